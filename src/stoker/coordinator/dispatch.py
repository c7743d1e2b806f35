"""Starting what needs no worker: model calls, pauses, timers, branches of the rollout.

Each hands its result to ``arrived`` exactly once, unless the call is withdrawn first.
"""

import asyncio
from collections.abc import Callable
from hashlib import blake2b

import msgspec

from stoker.coordinator.calls import Call
from stoker.coordinator.lane import Lane
from stoker.coordinator.places import Places
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.errors import InternalError, StokerError
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import Verb
from stoker.model.generation import GenerateArguments, GenerateRequest, Generation
from stoker.rollout.arguments import TimerArguments
from stoker.seams.faultpoints import declare, reach

GENERATED = declare("coordinator.generated", "a model has answered and nobody has been told")

Arrived = Callable[[ActiveRollout, Result], None]


class Dispatcher:
    """Runs model calls on the lane and timers on the loop."""

    def __init__(
        self, lane: Lane, artifacts: ArtifactStore, arrived: Arrived, places: Places
    ) -> None:
        self._lane = lane
        self.places = places
        self._artifacts = artifacts
        self._arrived = arrived
        self.ended: Callable[[asyncio.Task[None]], None] = lambda _: None
        """Told of every model call's task that ended, so that a bug of ours is not lost in one."""

        self.branch: Callable[[ActiveRollout, Call], None]
        """Carries a branching of the rollout out; set once by the coordinator."""

    def start(self, rollout: ActiveRollout, call: Call, waited_seconds: float = 0.0) -> None:
        """Start ``call``; a timer that had waited before a crash fires that much earlier."""
        if call.verb is Verb.GENERATE:
            call.task = asyncio.create_task(self._generate(rollout, call))
            call.task.add_done_callback(self.ended)
        elif call.verb in {Verb.SLEEP, Verb.TIMER}:
            seconds = msgspec.msgpack.decode(call.arguments, type=TimerArguments).seconds
            call.timer = asyncio.get_running_loop().call_later(
                max(0.0, seconds - waited_seconds), self._fire, rollout, call
            )
        elif call.verb is Verb.BRANCH:
            self.branch(rollout, call)
        else:
            assert call.verb is Verb.LOCAL, f"{call.verb} is not started here"

    def withdraw(self, call: Call) -> None:
        """Stop ``call``; it gives no result any more."""
        if call.task is not None:
            call.task.cancel()
        if call.timer is not None:
            call.timer.cancel()

    def _fire(self, rollout: ActiveRollout, call: Call) -> None:
        self._arrived(rollout, Result(path=call.path))

    async def _generate(self, rollout: ActiveRollout, call: Call) -> None:
        request_id = f"{rollout.rollout_id}/{call.path}"
        try:
            now = asyncio.get_running_loop().time()
            request = _request(rollout, call, request_id)
            generation = await self._lane.generate(request, self.places.order(rollout, now))
            result = self._returned(rollout, call, generation)
        except StokerError as error:
            self._arrived(rollout, Result(path=call.path, fault=error.record()))
            return
        except Exception as error:  # noqa: BLE001 - boundary: a backend's bug is one rollout's fault, not the run's
            fault = InternalError(f"model call {request_id} failed: {error!r}").record()
            self._arrived(rollout, Result(path=call.path, fault=fault))
            return
        reach(GENERATED)
        self._arrived(rollout, result)

    def _returned(self, rollout: ActiveRollout, call: Call, generation: Generation) -> Result:
        if call.path in rollout.reissued:
            generation = msgspec.structs.replace(generation, reissued=True)
        rollout.history.returned(call.path, generation)
        rollout.tokens += generation.token_count
        rollout.policy_versions.update(span.policy_version for span in generation.spans)
        return Result(path=call.path, value=self._artifacts.put(msgspec.msgpack.encode(generation)))


def _request(rollout: ActiveRollout, call: Call, request_id: str) -> GenerateRequest:
    arguments = msgspec.msgpack.decode(call.arguments, type=GenerateArguments)
    history = rollout.history
    return GenerateRequest(
        request_id=request_id,
        rollout_id=rollout.rollout_id,
        task_id=rollout.admitted.task.task_id,
        step=history.step(call.path),
        messages=history.messages(call.path),
        tools=history.tools(call.path),
        sampling=arguments.sampling,
        seed=_sampling_seed(rollout.admitted.epoch, call.path),
        prompt_ids=history.known_ids(call.path),
        known_messages=history.known_messages(call.path),
        priority=rollout.order,
        history=history.root(call.path),
    )


def _sampling_seed(epoch: str, path: str) -> int:
    """Return the seed of a model call: of the epoch, so that a branch samples anew."""
    digest = blake2b(f"{epoch}\0{path}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
