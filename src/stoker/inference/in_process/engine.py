"""Continuous batching: the sequences that run, and one step for all of them. No thread, no clock.

Each step computes one token of every sequence that has its prompt behind it, and a stretch of the
prompts that are new. A sequence that ends frees its slot in that step, and whoever waits is in the
next one. Weights change between two steps: sequences go on with the keys and values they have (as
vLLM's ``keep``), and their spans say which token is of which weights; what free slots hold is
forgotten.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from stoker.errors import ModelUnavailable
from stoker.inference.in_process.choosing import choose, number
from stoker.inference.in_process.network import Stretch
from stoker.inference.in_process.slots import Slots
from stoker.model.generation import FinishReason, Generation, VersionSpan

PREFILL_TOKENS = 512
"""Prompt tokens of one step, all sequences together: who is sampling waits no longer than that."""


class Computing(Protocol):
    """What the engine needs of a network."""

    def step(self, stretches: Sequence[Stretch]) -> Any:  # noqa: ANN401 - a tensor
        """Return logits after each stretch that is ``last``."""
        ...

    def copy(self, source: int, *, target: int, count: int) -> None:
        """Copy the beginning of a slot."""
        ...

    def wipe(self, slot: int) -> None:
        """Forget a slot."""
        ...


class Running:
    """One sequence: what was asked, and how far it is. Written by the engine only."""

    def __init__(
        self,
        prompt: "array[int]",
        *,
        tokens_max: int,
        temperature: float,
        seed: int,
        stop_ids: frozenset[int],
        stopped: Callable[["array[int]"], bool] | None = None,
        begun: Generation | None = None,
    ) -> None:
        assert prompt, "something must be there to go on from"
        assert tokens_max > 0, "nothing to sample is no call"
        self.ids = array("i", prompt)
        self.prompt_tokens = len(prompt)
        self.tokens_max = tokens_max
        self.temperature = temperature
        self.seed = seed
        self.stop_ids = stop_ids
        self.stopped = stopped
        """Says of all sampled ids whether a stop text is in them."""
        self.logprobs = array("f", begun.logprobs if begun is not None else b"")
        self.versions = list(begun.spans if begun is not None else ())
        if begun is not None:
            assert len(begun.logprobs) == len(begun.token_ids), "what it begins with is our own"
            self.ids += array("i", begun.token_ids)
        self.given_tokens = len(self.ids)
        """Of prompt and begun turn: what is there to compute before anything is sampled."""
        self.finish = FinishReason.ABORTED
        """Why it ended, once it has."""
        self.slot = -1
        self.computed = 0
        """Tokens whose keys and values are in the slot."""
        self.began_with = 0
        """Policy version of its first step."""

    @property
    def sampled(self) -> "array[int]":
        """What was sampled so far."""
        return self.ids[self.prompt_tokens :]

    def take(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Go on by one token; return why that was the last, or ``None``."""
        at = len(self.logprobs)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].policy_version == version:
            self.versions[-1] = VersionSpan(version, self.versions[-1].start, at + 1)
        else:
            self.versions.append(VersionSpan(version, at, at + 1))
        if token in self.stop_ids or (self.stopped is not None and self.stopped(self.sampled)):
            return FinishReason.STOP
        return FinishReason.LENGTH if at + 1 >= self.tokens_max else None


Ended = Callable[[Running, ModelUnavailable | None], None]


class Engine:
    """Everything that runs on one network."""

    def __init__(self, network: Computing, slots: int, ended: Ended) -> None:
        self.network = network
        self.version = 0
        self.tokens_prefilled = 0
        """Prompt tokens computed; what was found in a slot is not among them."""
        self.tokens_sampled = 0
        self._slots = Slots(slots)
        self._ended = ended
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def submit(self, sequence: Running) -> None:
        """Let ``sequence`` run from the next step in which a slot is free."""
        self._waiting.append(sequence)

    def abort(self, sequence: Running) -> None:
        """Forget ``sequence``; nothing to do where it has ended."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._release(sequence)

    def interrupt(self) -> None:
        """End every sequence where it is: what it has sampled is whole, only its turn is not."""
        for sequence in [*self._running, *self._waiting]:
            self.abort(sequence)
            self._ended(sequence, None)

    def change_weights(self, version: int) -> None:
        """Stamp what is sampled from now on with ``version``; the network has the new weights."""
        self.version = version
        self._slots.forget()

    def fail(self, error: ModelUnavailable) -> None:
        """End everything that was asked with ``error``; what slots hold may be half written."""
        failed = [*self._running, *self._waiting]
        self._waiting.clear()
        for sequence in list(self._running):
            self._release(sequence)
            self.network.wipe(sequence.slot)
        self._slots.forget()
        for sequence in failed:
            self._ended(sequence, error)

    def step(self) -> int:
        """Compute one step; return how many sequences ended in it."""
        while self._waiting and self._slots.free_count:
            self._begin(self._waiting.popleft())
        computed, stretches = self._stretches()
        if not stretches:
            return 0
        logits = self.network.step(stretches)
        sampling: list[Running] = []
        for sequence, stretch in zip(computed, stretches, strict=True):
            self._advance(sequence, stretch)
            if stretch.last:
                sampling.append(sequence)
        if not sampling:
            return 0
        return self._sample(sampling, logits)

    def _begin(self, sequence: Running) -> None:
        place = self._slots.place(sequence.ids.tobytes())
        if place.copied_from is not None:
            self.network.copy(place.copied_from, target=place.slot, count=place.reused)
        sequence.slot, sequence.computed = place.slot, place.reused
        sequence.began_with = self.version
        self._running.append(sequence)

    def _stretches(self) -> tuple[list[Running], list[Stretch]]:
        computed: list[Running] = []
        stretches: list[Stretch] = []
        room = PREFILL_TOKENS
        for sequence in self._running:
            left = len(sequence.ids) - sequence.computed
            count = left
            if sequence.computed < sequence.given_tokens:
                count = min(left, room)
                room -= count
            if count:
                start = sequence.computed
                ids = sequence.ids[start : start + count]
                computed.append(sequence)
                stretches.append(Stretch(sequence.slot, start, ids, count == left))
        return computed, stretches

    def _advance(self, sequence: Running, stretch: Stretch) -> None:
        sequence.computed += len(stretch.ids)
        if stretch.start >= sequence.given_tokens:
            return
        self.tokens_prefilled += len(stretch.ids)
        if stretch.last and sequence.began_with == self.version:
            self._slots.keep(sequence.slot, sequence.ids.tobytes())

    def _sample(self, sampling: list[Running], logits: Any) -> int:  # noqa: ANN401 - a tensor
        chosen, logprobs = choose(
            logits,
            [sequence.temperature for sequence in sampling],
            [number(sequence.seed, len(sequence.logprobs)) for sequence in sampling],
        )
        ended = 0
        for sequence, token, logprob in zip(sampling, chosen, logprobs, strict=True):
            problem = None
            if math.isnan(logprob):
                problem = ModelUnavailable(
                    f"the weights of policy version {self.version} gave no numbers; the call was "
                    "given up"
                )
            else:
                self.tokens_sampled += 1
                reason = sequence.take(token, logprob, self.version)
                if reason is None:
                    continue
                sequence.finish = reason
            self._release(sequence)
            if problem is not None:
                self._slots.keep(sequence.slot, b"")
                self.network.wipe(sequence.slot)
            self._ended(sequence, problem)
            ended += 1
        return ended

    def _release(self, sequence: Running) -> None:
        self._running.remove(sequence)
        whole = sequence.began_with == self.version
        self._slots.release(
            sequence.slot, sequence.ids[: sequence.computed].tobytes() if whole else b""
        )
