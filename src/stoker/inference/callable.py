"""``callable:``: the embedding process owns the engine and supplies the call.

This is how a trainer uses Stoker from inside: it hands ``CallableModel(generate, …)`` to
``coordinator.execute.execute(request, model=…)``, one for each partition it executes. What the
function returns is checked where it enters (arrays of equal length, spans without gaps), since a
trainer would otherwise be fed shifted arrays; what it raises is the model's failure, not the run's.
"""

import asyncio
from collections.abc import Awaitable, Callable

from stoker.errors import ConfigInvalid, ModelUnavailable, StokerError
from stoker.inference.account import CallAccount
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo, Weights
from stoker.inference.continuing import fresh_tokens, is_aborted
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

Generate = Callable[[GenerateRequest], Awaitable[Generation]]
Interrupt = Callable[[], Awaitable[object]]


class CallableModel:
    """One replica behind an async function of the embedding process; used on one event loop.

    ``window`` is how many calls it takes at once. A call that is no longer wanted is cancelled:
    the function sees ``CancelledError`` at its await and must let go of the engine's request.
    ``pause`` and ``resume`` bracket a weight update of the owner: the lane holds new calls.

    ``interrupt`` tells the engine to abort what it samples: the function then returns each of
    those turns as far as it is, with the finish reason *aborted*, and is asked for the whole turn
    again with ``request.begun``. Where it does not heed that, the turn is sampled anew.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        window: int,
        name: str = "callable",
        logprob_kind: LogprobKind = LogprobKind.SAMPLED,
        kv_tokens: int | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        assert window > 0, "a model takes at least one call at once"
        self._generate = generate
        self._info = ModelInfo(
            name=f"callable:{name}",
            replicas=(ReplicaInfo(replica=0, window=window, kv_tokens=kv_tokens),),
            logprob_kind=logprob_kind,
            simulated=False,
        )
        self._account = CallAccount()
        self._interrupt = interrupt
        self._quiet = asyncio.Event()
        self._is_paused = False
        self._paused: Callable[[], None] = lambda: None
        self._resumed: Callable[[], None] = lambda: None

    def info(self) -> ModelInfo:
        """Return what it is."""
        return self._info

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Return what the owner's function samples.

        Raises:
            StokerError: as the function raised it.
            ModelUnavailable: it raised anything else, or returned what is no generation.

        **Cancellation:** the function is cancelled.
        """
        assert replica == 0
        self._account.begun()
        self._quiet.clear()
        try:
            generation = await self._generate(request)
        except StokerError:
            raise
        except Exception as error:
            # Boundary to the owner's engine: whatever it raises is one try's failure.
            raise ModelUnavailable(
                f"the model {self._info.name} raised {type(error).__name__} for call "
                f"{request.request_id}: {error}",
                request_id=request.request_id,
                replica=0,
            ) from error
        finally:
            self._account.ended()
            if not self._account.running:
                self._quiet.set()
        problem = flaw(generation)
        if problem:
            raise ModelUnavailable(
                f"the model {self._info.name} returned for call {request.request_id} what cannot "
                f"be used: {problem}",
                request_id=request.request_id,
                replica=0,
            )
        if is_aborted(generation) and not fresh_tokens(request, generation):
            raise thrown_away(request.request_id, 0)
        self._account.answered(request, generation)
        return generation

    async def interrupt(self) -> None:
        """Let the owner's engine abort what it samples; return once no call is in flight.

        Without a function that does so, nothing is ended.

        Raises:
            ModelUnavailable: the function raised.
        """
        if self._interrupt is None:
            return
        try:
            await self._interrupt()
        except Exception as error:
            # Boundary to the owner's engine, as above.
            raise ModelUnavailable(
                f"the model {self._info.name} could not be interrupted: {error!r}"
            ) from error
        if self._account.running:
            await self._quiet.wait()

    def load(self, replica: int) -> DeviceLoad:
        """Return what our calls did."""
        assert replica == 0
        return self._account.load()

    def watch_pauses(self, paused: Callable[[], None], resumed: Callable[[], None]) -> None:
        """Call ``paused`` and ``resumed`` as the owner pauses and resumes."""
        self._paused, self._resumed = paused, resumed
        if self._is_paused:
            paused()

    def pause(self) -> None:
        """Hold new calls: the weights are about to change. Calls in flight go on."""
        self._is_paused = True
        self._paused()

    def resume(self) -> None:
        """Issue calls again."""
        self._is_paused = False
        self._resumed()

    async def take_policy(self, version: int, weights: Weights) -> None:
        """Let the owner's function load ``weights``; new calls are held, those in flight go on.

        Raises:
            ConfigInvalid: ``weights`` is a place: only the owner can load into its engine.

        What the function raises is raised again. The owner stamps spans with ``version``.
        """
        del version
        if not callable(weights):
            raise ConfigInvalid(
                f"the model {self._info.name} is an engine of this process: give "
                "publish_policy the function that loads weights, not a place; nothing was loaded"
            )
        self.pause()
        try:
            await weights()
        finally:
            self.resume()

    async def close(self) -> None:
        """Nothing to let go of: the engine is the owner's."""


def thrown_away(request_id: str, count: int) -> ModelUnavailable:
    """Return what is raised for a call that was aborted and cannot be gone on from."""
    return ModelUnavailable(
        f"the engine aborted call {request_id} after {count} tokens; what it had sampled was "
        "thrown away",
        request_id=request_id,
    )


def flaw(generation: object) -> str:
    """Return what makes ``generation`` unusable, in words; empty where nothing does."""
    if not isinstance(generation, Generation):
        return f"{generation!r:.100} is no Generation"
    if len(generation.token_ids) % 4 or len(generation.prompt_ids) % 4:
        return "ids are int32 arrays in bytes, four bytes each"
    count = generation.token_count
    if generation.logprobs and len(generation.logprobs) != 4 * count:
        return f"{count} token ids and {len(generation.logprobs) / 4:g} log-probabilities"
    at = 0
    for span in generation.spans:
        if span.start != at or span.end <= at:
            return f"version spans {generation.spans!r:.200} have gaps"
        at = span.end
    if at != count:
        return f"version spans end at {at} of {count} tokens"
    return ""
