"""A continuous-batching device as a pure machine of time: no loop, no clock, no waiting.

A step takes ``a + c·(decoding sequences) + p·(new prefill tokens)`` and gives each decoding
sequence one token; a sequence decodes in the step that ends its prefill. Calls start first come
first served, up to ``window``, when their uncached tokens plus 1 % fit in what running sequences
leave of the KV cache; overflow preempts the newest, which starts again with all it had to prefill.
Nothing changes between steps, so equal steps are taken in one jump up to the next finish; an
arrival or abort ends the jump at the step then under way. When a step gave calls back, and when an
idle device gets its first call, the next step begins only when told to (``begin``): calls of one
moment, and those that take the places just given back, share a step.

The caller brings the time. ``advance`` applies every step that has ended by then, at the moment it
ended, however late the caller is: the figures do not depend on who drives it.
"""

import math
from collections import deque

from stoker.inference.base import DeviceLoad
from stoker.inference.prefix_cache import Prefix, PrefixCache
from stoker.inference.profile import SimProfile

_TICK = 2e-9
"""Timers may fire this early (a loop's clock resolution)."""
_MARGIN = 1.01
"""Uncached tokens times this must fit before a call starts."""


class DeviceCall:
    """One call on the device; sizes are tokens of the device."""

    __slots__ = (
        "cached_tokens",
        "context",
        "owner",
        "preemptions",
        "prefill_left",
        "prompt",
        "prompt_tokens",
        "sample_tokens",
        "sampled",
    )

    def __init__(
        self, *, owner: str, prompt: bytes, context: bytes, prompt_tokens: int, sample_tokens: int
    ) -> None:
        assert sample_tokens > 0
        self.owner = owner
        self.prompt = prompt
        self.context = context
        self.prompt_tokens = prompt_tokens
        self.sample_tokens = sample_tokens
        self.sampled = 0
        self.prefill_left = 0
        self.cached_tokens = 0
        self.preemptions = 0

    @property
    def held_tokens(self) -> int:
        """KV it holds while running."""
        return self.prompt_tokens + self.sampled


class _Plan:
    """Equal steps under way since ``start``."""

    __slots__ = ("decoding", "prefill", "seconds", "start", "steps")

    def __init__(self, start: float, steps: int, seconds: float) -> None:
        self.start = start
        self.steps = steps
        self.seconds = seconds
        self.decoding: list[DeviceCall] = []
        self.prefill: list[tuple[DeviceCall, int]] = []

    @property
    def end(self) -> float:
        return self.start + self.steps * self.seconds

    def leave(self, call: DeviceCall) -> None:
        self.decoding = [one for one in self.decoding if one is not call]
        self.prefill = [part for part in self.prefill if part[0] is not call]


class Device:
    """One replica's device; see the module."""

    def __init__(self, profile: SimProfile, now: float) -> None:
        scale = profile.time_scale
        self._a, self._c, self._p = profile.a * scale, profile.c * scale, profile.p * scale
        self._window = profile.window
        self._kv = profile.kv_tokens
        self._prefill_max = profile.prefill_tokens_max
        self._waiting: deque[DeviceCall] = deque()
        self._running: list[DeviceCall] = []
        self._held = 0
        self._idle = PrefixCache()
        self._plan: _Plan | None = None
        self._start_at: float | None = None
        self._accrued_at = now
        self._active = self._sequence_seconds = 0.0
        self._sampled = self._prefilled = 0
        self.preemptions = 0

    @property
    def capacity(self) -> float:
        """Tokens a second with a full window and nothing to prefill: the bound."""
        return self._window / (self._a + self._c * self._window)

    def submit(self, call: DeviceCall, now: float) -> None:
        """Queue ``call``, which must fit in memory alone; the caller has advanced to ``now``."""
        assert not self._kv or call.prompt_tokens + call.sample_tokens <= self._kv
        self._accrue(now)
        self._waiting.append(call)
        self._interrupt(now)

    def abort(self, call: DeviceCall, now: float) -> None:
        """Forget ``call`` if it is still here; its memory is free at once."""
        self._accrue(now)
        if call in self._waiting:
            self._waiting.remove(call)
            if not self._running and not self._waiting:
                self._start_at = None
        elif call in self._running:
            self._drop(call)
            if self._plan is not None:
                self._plan.leave(call)
            self._interrupt(now)

    @property
    def start_at(self) -> float | None:
        """When the next step starts if ``begin`` is called now; ``None``: none is due."""
        return self._start_at

    def next_event(self) -> float | None:
        """Return when ``advance`` is wanted next; ``None``: nothing is under way."""
        return self._plan.end if self._plan is not None else None

    def begin(self) -> None:
        """Start the next step if one is due, at the moment the last of its calls came."""
        if self._start_at is not None:
            at, self._start_at = self._start_at, None
            self._begin(at)

    def advance(self, now: float) -> list[DeviceCall]:
        """Apply every step that ended by ``now``; return the calls that finished, in order."""
        finished: list[DeviceCall] = []
        while (plan := self._plan) is not None:
            if now + _TICK < plan.end:
                steps = int((now + _TICK - plan.start) / plan.seconds)
                if steps > 0:
                    self._apply(plan, steps)
                    plan.start += steps * plan.seconds
                    plan.steps -= steps
                break
            end = plan.end
            self._accrue(end)
            self._apply(plan, plan.steps)
            done = [call for call in plan.decoding if call.sampled >= call.sample_tokens]
            if not done:
                self._begin(end)
                continue
            for call in done:
                self._drop(call)
                self._idle.put(Prefix(call.owner, call.context, call.held_tokens))
            finished += done
            self._plan = None
            self._start_at = end if self._running or self._waiting else None
        self._accrue(now if self._start_at is None else min(now, self._start_at))
        return finished

    def load(self) -> DeviceLoad:
        """Return what it has done up to the last ``advance``."""
        return DeviceLoad(
            active_seconds=self._active,
            tokens_sampled=self._sampled,
            tokens_prefilled=self._prefilled,
            running=len(self._running),
            kv_used_share=self._held / self._kv if self._kv else 0.0,
            preemptions=self.preemptions,
            sequence_seconds=self._sequence_seconds,
            capacity_tokens_per_second=self.capacity,
        )

    def _accrue(self, now: float) -> None:
        seconds = now - self._accrued_at
        if seconds <= 0:
            return
        self._accrued_at = now
        if self._running:
            self._active += seconds
            self._sequence_seconds += seconds * len(self._running)

    def _interrupt(self, now: float) -> None:
        """End the jump after the step under way; with nobody in it, wait to be told to begin."""
        if self._plan is not None and self._running:
            self._plan.steps = 1
            return
        self._plan = None
        self._start_at = now if self._running or self._waiting else None

    def _begin(self, now: float) -> None:
        """Start what fits and plan the next steps from ``now``."""
        self._plan = None
        self._start_waiting()
        if not self._running:
            return
        prefill, decoding = self._share_out()
        while self._kv and self._held + len(decoding) > self._kv and len(self._running) > 1:
            self._preempt()
            prefill, decoding = self._share_out()
        chunk = sum(tokens for _, tokens in prefill)
        seconds = self._a + self._c * len(decoding) + self._p * chunk
        plan = _Plan(now, self._equal_steps(prefill, decoding), seconds)
        plan.decoding, plan.prefill = decoding, prefill
        self._plan = plan

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._window:
            call = self._waiting[0]
            prefix = self._idle.find(call.owner, call.prompt)
            cached = min(prefix.tokens, call.prompt_tokens) if prefix is not None else 0
            new = call.held_tokens - cached
            if self._kv and self._running:
                need = self._held + cached + math.ceil(new * _MARGIN)
                if need > self._kv:
                    return
            self._waiting.popleft()
            if prefix is not None:
                self._idle.take(prefix)
            call.cached_tokens = cached
            call.prefill_left = new
            self._running.append(call)
            self._held += call.held_tokens
            self._make_room()

    def _share_out(self) -> tuple[list[tuple[DeviceCall, int]], list[DeviceCall]]:
        """Return the prefill of the next step, oldest call first, and who decodes in it."""
        budget = self._prefill_max
        prefill: list[tuple[DeviceCall, int]] = []
        decoding: list[DeviceCall] = []
        for call in self._running:
            chunk = min(call.prefill_left, budget)
            budget -= chunk
            if chunk:
                prefill.append((call, chunk))
            if call.prefill_left == chunk:
                decoding.append(call)
        return prefill, decoding

    def _equal_steps(
        self, prefill: list[tuple[DeviceCall, int]], decoding: list[DeviceCall]
    ) -> int:
        """Return for how many steps prefill and decoding stay as they are."""
        assert prefill or decoding, "running sequences prefill or decode"
        steps = []
        if prefill:
            first, chunk = prefill[0]
            if chunk < self._prefill_max:
                return 1
            steps.append((first.prefill_left - 1) // chunk)
        if decoding:
            steps.append(min(call.sample_tokens - call.sampled for call in decoding))
            if self._kv and len(self._running) > 1:
                steps.append((self._kv - self._held) // len(decoding))
        return max(1, min(steps))

    def _apply(self, plan: _Plan, steps: int) -> None:
        for call, chunk in plan.prefill:
            call.prefill_left -= steps * chunk
            self._prefilled += steps * chunk
        for call in plan.decoding:
            call.sampled += steps
        grown = steps * len(plan.decoding)
        self._sampled += grown
        self._held += grown
        self._make_room()

    def _make_room(self) -> None:
        if self._kv:
            self._idle.shrink(self._kv - self._held)

    def _preempt(self) -> None:
        """Send the newest back to the head of the queue; its memory is lost."""
        call = self._running[-1]
        self._drop(call)
        call.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(call)

    def _drop(self, call: DeviceCall) -> None:
        self._running.remove(call)
        self._held -= call.held_tokens
