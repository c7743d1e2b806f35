"""One model call over its tries: how long each may take, failing over, going on after an abort.

A try ends in an answer, in a failure, or aborted: by its replica, or by us because the weights are
about to change. A failure counts against ``lane.retries``; an abort does not, and what it gave of
the turn is gone on from in the next try. Nothing here waits for room.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from stoker.config.tree import LaneSettings
from stoker.errors import ModelUnavailable
from stoker.inference.base import Interrupting, Model
from stoker.inference.continuing import is_aborted
from stoker.model.generation import FinishReason, GenerateRequest, Generation

RETRY_SECONDS_MAX = 30.0
"""No pause between two tries is longer, before jitter."""
INTERRUPT_SECONDS = 5.0
"""Calls that have not ended by then, asked to, are cancelled: their turns are sampled anew."""
_TURNS = 8
"""Turns of the loop an answer may need to get from a model to us."""
_NOTHING = Generation(text="", finish_reason=FinishReason.ABORTED)
"""What a try gives that was taken back and left nothing to go on from."""


class Course:
    """The tries of one call: what to ask next, and where not."""

    def __init__(
        self, request: GenerateRequest, settings: LaneSettings, jitter: Callable[[float], float]
    ) -> None:
        self.request = request
        """With what was sampled of the turn so far."""
        self.avoid: int | None = None
        """The replica that failed last."""
        self.anew = False
        """Something of it was sampled and is lost."""
        self._settings = settings
        self._jitter = jitter
        self._failures = 0

    def failed(self, error: ModelUnavailable, replica: int) -> None:
        """Count a failed try; raises what the caller is told where it was the last."""
        self.avoid = replica
        self._failures += 1
        if self._failures <= self._settings.retries:
            return
        request = self.request
        raise ModelUnavailable(
            f"model call {request.request_id} (rollout {request.rollout_id}, step {request.step}) "
            f"failed {self._failures} times, last on replica {replica}: {error.message}. The call "
            "was given up; look at the model server, then resume.",
            request_id=request.request_id,
            rollout_id=request.rollout_id,
            replica=replica,
        ) from error

    def aborted(self, generation: Generation, replica: int) -> bool:
        """Go on, in the next try, from what an aborted one gave; return whether there is any.

        One that came no further than another before counts as failed, and so does one that had
        all the tokens it may have: there must be an end.
        """
        begun = self.request.begun
        count = begun.token_count if begun is not None else 0
        full = count >= self.request.sampling.tokens_max
        if generation.token_count > count and not full:
            self.anew |= self._passed_over(generation)
            self.request = msgspec.structs.replace(self.request, begun=generation)
        elif generation.token_ids:
            self.failed(ModelUnavailable("it was aborted again and came no further"), replica)
        elif begun is None:
            self.anew = True
        return self.request.begun is not None

    def whole(self, generation: Generation) -> Generation:
        """Return the answer, which says whether an earlier sampling of it was lost."""
        anew = self.anew or self._passed_over(generation)
        return msgspec.structs.replace(generation, reissued=True) if anew else generation

    def _passed_over(self, generation: Generation) -> bool:
        """Whether it was sampled anew although there was something to go on from."""
        begun = self.request.begun
        return begun is not None and not generation.token_ids.startswith(begun.token_ids)

    def pause(self, failed: ModelUnavailable, *, alone: bool) -> float:
        """Return how long to wait after ``failed``; ``alone``: there is nobody else to ask."""
        doubled = self._settings.retry_delay * 2.0 ** (self._failures - 1)
        if alone:  # the server's own Retry-After is heeded
            doubled = max(doubled, float(failed.context.get("retry_after_seconds", 0.0)))
        return self._jitter(min(RETRY_SECONDS_MAX, doubled))


class TakenBack(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the tries that were ended."""

    continued: int
    """Gave what they had sampled: their turns go on from it."""
    anew: int
    """Gave nothing: what they had sampled is lost."""


class _Try:
    """One try under way."""

    __slots__ = ("bound", "kept", "lost", "taken")

    def __init__(self, bound: asyncio.Timeout) -> None:
        self.bound = bound
        self.taken = self.kept = self.lost = False
        """It is to end now: whatever happens to it is no failure. It gave something; nothing."""

    def nothing(self, request: GenerateRequest) -> Generation:
        """Note that this try gave nothing; what was begun before it is still there."""
        self.kept = request.begun is not None
        self.lost = not self.kept
        return _NOTHING


class Tries:
    """The tries on replicas, each within ``seconds``."""

    def __init__(self, model: Model, seconds: float) -> None:
        self._model = model
        self._seconds = seconds
        self._running: set[_Try] = set()
        self._none = asyncio.Event()
        """Set when the last of them ended."""

    async def run(self, replica: int, request: GenerateRequest) -> Generation:
        """Ask ``replica``; aborted and empty where the try was taken back and gave nothing.

        Raises:
            ModelUnavailable: it failed, or took too long and was aborted.

        **Cancellation:** aborted on the replica.
        """
        one = _Try(asyncio.timeout(self._seconds))
        self._running.add(one)
        try:
            async with one.bound:
                generation = await self._model.generate(replica, request)
                one.kept = is_aborted(generation)
                return generation
        except TimeoutError as error:
            if not one.bound.expired():
                raise
            if one.taken:
                return one.nothing(request)
            raise ModelUnavailable(
                f"replica {replica} did not answer call {request.request_id} within "
                f"{self._seconds:g} s (lane.call_timeout); it was aborted",
                replica=replica,
                request_id=request.request_id,
            ) from error
        except ModelUnavailable:
            if one.taken:
                return one.nothing(request)
            raise
        finally:
            self._running.discard(one)
            if not self._running:
                self._none.set()

    async def end(self) -> TakenBack:
        """End every try under way, keeping what it has sampled where the model can give it."""
        ended = tuple(self._running)
        for one in ended:
            one.taken = True
        if self._running and isinstance(self._model, Interrupting):
            with suppress(TimeoutError, ModelUnavailable):  # those that go on are cancelled
                async with asyncio.timeout(INTERRUPT_SECONDS):
                    await self._model.interrupt()
            await self._turns()
        now = asyncio.get_running_loop().time()
        for one in self._running:
            if not one.bound.expired():
                one.bound.reschedule(now)
        if self._running:
            self._none.clear()
            await self._none.wait()
        return TakenBack(
            continued=sum(one.kept for one in ended), anew=sum(one.lost for one in ended)
        )

    async def _turns(self) -> None:
        """Let answers that are there reach whoever waits for them."""
        for _ in range(_TURNS):
            if self._running:
                await asyncio.sleep(0)
