"""From a started lease to its completion: the one boundary at which everything becomes typed.

Whatever a tool, a box or our own code does, the result is a completion that can be encoded and is
bounded and typed, and the worker lives (A25). An infrastructure fault is an ``error`` with a fault
of that side, never an observation.
"""

from stoker.errors import EnvironmentLost, ToolRefused
from stoker.model.completion import Completion, CompletionStatus, EnvironmentState
from stoker.model.tools import CallResult

from .attempt import Attempt, Done, fault_of
from .environments import Environments
from .observation import Artifacts, fetch, store
from .tools import Tools


class Executor:
    """Carries out actions and turns every ending into a completion."""

    def __init__(self, tools: Tools, environments: Environments, artifacts: Artifacts) -> None:
        self._tools = tools
        self._environments = environments
        self._artifacts = artifacts

    async def execute(self, attempt: Attempt) -> Completion:
        """Return how the action ended. **Cancellation:** see ``Tools.carry_out``."""
        try:
            content = await fetch(attempt.action.input, self._artifacts)
            done = await self._tools.carry_out(attempt, content)
        except TimeoutError:
            state = self._state(attempt)
            if state is EnvironmentState.CLEAN:
                state = EnvironmentState.INTERRUPTED
            done = Done(status=CompletionStatus.TIMED_OUT, environment=state)
            return attempt.completion(done, None)
        except Exception as error:  # noqa: BLE001 - the named boundary: the worker outlives any tool
            return self._failed(attempt, error)
        return await self._collected(attempt, done)

    async def _collected(self, attempt: Attempt, done: Done) -> Completion:
        tool = attempt.action.tool
        try:
            return attempt.completion(done, await store(done.result, tool, self._artifacts))
        except ToolRefused as error:
            if not isinstance(done.result, CallResult):
                return self._failed(attempt, error)
            # The call did run: what cannot travel is its value, and the program should see why.
            done.result = CallResult(error=error.message, run=done.result.run)
            return attempt.completion(done, await store(done.result, tool, self._artifacts))
        except Exception as error:  # noqa: BLE001 - the named boundary: a full disk, a bug
            return self._failed(attempt, error)

    def _failed(self, attempt: Attempt, error: Exception) -> Completion:
        done = Done(status=CompletionStatus.ERROR, environment=self._state(attempt))
        if isinstance(error, EnvironmentLost):
            done.environment = EnvironmentState.LOST
        fault = fault_of(error, attempt.action, attempt.worker_id)
        return attempt.completion(done, None, fault)

    def _state(self, attempt: Attempt) -> EnvironmentState:
        """Return what is left of the environment, asked of the table itself."""
        action = attempt.action
        if action.environment_id is None:
            return EnvironmentState.NONE
        try:
            self._environments.get(action.environment_id, action.generation)
        except EnvironmentLost:
            return EnvironmentState.LOST
        return EnvironmentState.CLEAN
