"""Which contexts the KV caches are left to: the working set, where memory binds.

*Hot* are contexts that run, that are ready and cached, and that wait for a tool for less than
``keep`` seconds (from the fluid model). Then:

1. a ready call whose context is cached goes at once;
2. one whose context was given up is *parked*: the oldest returns when the hot contexts and its own
   fit; while one is parked, younger ones and new rollouts wait. One that waited ``AGED_SECONDS``
   returns regardless, now and then;
3. a new rollout starts when none is parked, the lane is not full, and the hot contexts, each at
   least at the size that rollouts reach, leave room for one more of that size.

A server evicts the longest waiter by itself; what it cannot do is stop a returning context from
evicting another that is about to return. There is a cliff on the far side of full memory, so the
sizes are the server's own, never more, and a start counts what a rollout *will* need.

Pure bookkeeping: the caller brings the time and does what is decided. Replicas whose memory is not
known are never held for. Source: docs/design/0012.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

from stoker.coordinator.fluid import TurnShape, keep_seconds
from stoker.coordinator.residency import KEPT_SHARE, Residency
from stoker.coordinator.step_cost import StepCosts
from stoker.inference.base import ReplicaInfo
from stoker.model.ids import RolloutId

AGED_SECONDS = 60.0
"""A parked call this old returns whether or not it fits …"""
AGED_EVERY_SECONDS = 15.0
"""… but at most one in this time."""
FILL = 1.0
"""Share of the memory that hot contexts may have."""
GROWTH = 0.65
"""Size a rollout is counted with at least, in mean contexts of rollouts that finished."""
GROWTH_UNKNOWN = 1.2
"""The same until ``_KNOWN_ROLLOUTS`` have finished: contexts grow far beyond the first prompt."""
_KNOWN_ROLLOUTS = 30
_RECENT_ROLLOUTS = 100
_CONTEXT_HINT = 12_000.0
_HINT_SHARE = 1 / 16
"""The hint is never more than this share of the memory."""
_WAITS = 400
_REFRESH_SECONDS = 2.0
_SMOOTH = 0.01
_BLOCK_TOKENS = 64
"""Servers cache whole blocks: so much may be missing of a context that is there."""


class _Context:
    """One history of one rollout."""

    __slots__ = ("history", "hot_on", "rollout", "since", "tokens", "weight", "whole")

    def __init__(self, history: str, rollout: "_Rollout", tokens: int) -> None:
        self.history = history
        self.rollout = rollout
        self.tokens = tokens
        self.whole = 0
        """Tokens it had when its last turn ended."""
        self.since: float | None = None
        """When its last turn ended; ``None``: it is ready or runs."""
        self.hot_on: Memory | None = None
        self.weight = 0
        """Tokens it is counted with while hot."""


class _Rollout:
    """What is known of one rollout."""

    __slots__ = ("context_sum", "contexts", "is_new", "turns")

    def __init__(self) -> None:
        self.contexts: list[_Context] = []
        self.context_sum = 0.0
        self.turns = 0
        self.is_new = True
        """Room was kept for it when it started; its first call uses that."""


class Memory:
    """The KV cache of one replica."""

    def __init__(self, kv_tokens: int, window: int) -> None:
        self.residency = Residency(kv_tokens)
        self.costs = StepCosts()
        self.window = window
        self.keep = math.inf
        """Seconds for which a waiting context is kept."""
        self.hot_tokens = 0
        self.hot: dict[str, _Context] = {}
        self.waiting: OrderedDict[str, _Context] = OrderedDict()
        """Hot ones that wait for a tool, longest first."""

    @property
    def free(self) -> float:
        """Tokens that hot contexts leave."""
        return FILL * self.residency.kept - self.hot_tokens

    def warm(self, context: _Context) -> None:
        """Count ``context`` as hot, at its present size."""
        self.cool(context)
        context.hot_on, context.weight = self, context.tokens
        self.hot[context.history] = context
        self.hot_tokens += context.weight

    def cool(self, context: _Context) -> None:
        """Stop counting ``context``, wherever it was counted."""
        memory = context.hot_on
        if memory is not None:
            memory.hot_tokens -= context.weight
            del memory.hot[context.history]
            memory.waiting.pop(context.history, None)
            context.hot_on = None


class WorkingSet:
    """Decides which ready calls and new rollouts the memory of the replicas has room for."""

    def __init__(self, replicas: Sequence[ReplicaInfo], kv_share: float = 1.0) -> None:
        self._memories = {
            one.replica: Memory(int(one.kv_tokens * kv_share), one.window)
            for one in replicas
            if one.kv_tokens and not one.kv_by_slot and kv_share > 0
        }
        self._windows = {one.replica: one.window for one in replicas}
        self._window = sum(self._windows.values())
        self._whole = sum(one.kv_tokens or 0 for one in replicas if one.replica in self._memories)
        self._contexts: dict[str, _Context] = {}
        self._rollouts: dict[RolloutId, _Rollout] = {}
        self._new = 0
        self._waits: deque[float] = deque(maxlen=_WAITS)
        kv = sum(memory.residency.kept for memory in self._memories.values())
        self.context_mean = min(_CONTEXT_HINT, kv * _HINT_SHARE)
        """Mean over finished rollouts of their context over life, tokens."""
        self._finished = 0
        self._sampled = self._fresh = self._turn_context = 0.0
        self._turns = 0
        self._refresh_at = -math.inf
        self._aged_at = -math.inf

    @property
    def limits(self) -> bool:
        """Whether the memory of any replica is known."""
        return bool(self._memories)

    def share(self, replica: int, part: float, window: int) -> None:
        """Have this part of a replica's memory, and so many calls at once."""
        self._window += window - self._windows[replica]
        self._windows[replica] = window
        memory = self._memories.get(replica)
        if memory is not None:
            memory.residency.share(part)
            memory.window = window

    @property
    def wanting(self) -> float:
        """Share of the replicas' whole memory that contexts would have; looks at each context."""
        hot = sum(memory.hot_tokens for memory in self._memories.values())
        cold = (c.tokens for c in self._contexts.values() if c.since is None and c.hot_on is None)
        return (hot + sum(cold)) / self._whole if self._whole else 0.0

    def memory(self, replica: int) -> Memory | None:
        """Return what is known of a replica's memory; ``None``: nothing."""
        return self._memories.get(replica)

    # --- rollouts ------------------------------------------------------------------------------

    def start(self, rollout_id: RolloutId) -> None:
        """A new rollout begins: room is kept for its first context."""
        if self.limits and rollout_id not in self._rollouts:
            self._rollouts[rollout_id] = _Rollout()
            self._new += 1

    def finish(self, rollout_id: RolloutId) -> None:
        """A rollout ended: its contexts are nobody's; learn how large they were."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is None:
            return
        self._settle_in(rollout)
        for context in rollout.contexts:
            if context.hot_on is not None:
                context.hot_on.cool(context)
            self._contexts.pop(context.history, None)
        if rollout.turns:
            self._finished += 1
            mean = rollout.context_sum / rollout.turns
            weight = min(self._finished + 1, _RECENT_ROLLOUTS)
            self.context_mean += (mean - self.context_mean) / weight

    def may_start(self, now: float, in_lane: int, ill: Collection[int] = ()) -> bool:
        """Return whether there is memory for a new rollout; ``in_lane``: calls ready or running.

        Replicas that are ``ill`` give none. The caller asks only while nothing is parked.
        """
        if not self.limits:
            return True
        self._sync(now)
        if in_lane >= self._window:
            return False
        least = self._least()
        expected = self._new * least
        free = -expected - least
        memories = [memory for index, memory in self._memories.items() if index not in ill]
        for memory in memories:
            free += FILL * memory.residency.kept
            free -= sum(max(context.weight, least) for context in memory.hot.values())
        return free >= 0 or not (self._new or any(one.hot for one in memories))

    # --- calls ---------------------------------------------------------------------------------

    def ready(self, history: str, rollout_id: RolloutId, tokens: int, now: float) -> None:
        """A call of ``tokens`` prompt tokens that goes on with ``history`` is ready."""
        if not self.limits:
            return
        self._sync(now)
        context = self._contexts.get(history)
        if context is None:
            rollout = self._rollouts.setdefault(rollout_id, _old_rollout())
            context = self._contexts[history] = _Context(history, rollout, tokens)
            rollout.contexts.append(context)
            return
        self._fresh += _SMOOTH * (max(0, tokens - context.whole) - self._fresh)
        context.tokens = tokens
        if context.since is not None:
            self._waits.append(now - context.since)
            context.since = None
        home = context.hot_on
        if home is not None:
            home.warm(context)  # at its new size; out of those that wait

    def is_first(self, history: str) -> bool:
        """Return whether room was kept for this call when its rollout started."""
        context = self._contexts.get(history)
        return context is None or context.rollout.is_new

    def had_turns(self, history: str) -> bool:
        """Return whether a turn of this history was answered: its context lay somewhere."""
        context = self._contexts.get(history)
        return context is not None and context.whole > 0

    def is_cached(self, history: str, replica: int) -> bool:
        """Return whether ``replica`` is believed to have the context; without limits it has."""
        memory = self._memories.get(replica)
        if memory is None:
            return True
        context = self._contexts.get(history)
        if context is None:  # its rollout has ended; the call is about to be withdrawn
            return True
        if not memory.residency.is_cached(history):
            if context.hot_on is memory:
                memory.cool(context)
            return False
        if context.hot_on is None:
            memory.warm(context)
        return True

    def fits(self, history: str, replica: int) -> bool:
        """Return whether ``replica`` has memory for a context, which is not in its own way."""
        memory = self._memories.get(replica)
        context = self._contexts.get(history)
        if memory is None or context is None:
            return True
        own = context.weight if context.hot_on is memory else 0
        return memory.hot_tokens == own or context.tokens <= memory.free + own

    def aged(self, since: float, now: float) -> bool:
        """Return whether a call parked since then returns whatever there is room for."""
        return now - since >= AGED_SECONDS and now - self._aged_at >= AGED_EVERY_SECONDS

    def forced(self, now: float) -> None:
        """An aged call was let in."""
        self._aged_at = now

    def issue(self, call: int, history: str, replica: int) -> None:
        """A call begins on ``replica``."""
        context = self._contexts.get(history)
        if context is None:
            return
        self._settle_in(context.rollout)
        memory = self._memories.get(replica)
        if memory is None:
            return
        context.tokens += int(self._sampled / 2)
        memory.warm(context)
        memory.residency.run(call, history, context.tokens)

    def answer(
        self, call: int, history: str, replica: int, *, prompt: int, sampled: int,
        cached: int | None, now: float,
    ) -> None:  # fmt: skip
        """A call was answered: what its context is now, and what the server had of it."""
        memory = self._memories.get(replica)
        if memory is None:
            return
        context = self._contexts.get(history)
        whole = context.whole if context is not None else 0
        found = None
        if whole and cached is not None:
            found = cached + _BLOCK_TOKENS >= KEPT_SHARE * whole
        memory.residency.end(call, found=found)
        tokens = prompt + sampled
        memory.residency.keep(history, tokens)
        self._learn(prompt, sampled)
        if context is None:
            return
        context.rollout.context_sum += tokens
        context.rollout.turns += 1
        context.tokens = context.whole = tokens
        context.since = now
        memory.cool(context)
        if memory.residency.keeps:
            memory.warm(context)
            memory.waiting[history] = context

    def abort(self, call: int, history: str, replica: int) -> None:
        """A call failed or was withdrawn: nothing is known to be left of its context."""
        memory = self._memories.get(replica)
        if memory is None:
            return
        memory.residency.end(call)
        context = self._contexts.get(history)
        if context is not None and context.hot_on is not None:
            context.hot_on.cool(context)

    def flush(self) -> None:
        """The replicas dropped what was cached: no waiting context is worth anything now."""
        for memory in self._memories.values():
            memory.residency.forget()
            for context in list(memory.waiting.values()):
                memory.cool(context)

    def pass_to(self, now: float) -> None:
        """Let go of what waited too long by now."""
        self._sync(now)

    def changes_at(self, now: float, parked_since: float | None) -> float | None:
        """Return when something may fit that does not now, though nothing happens until then."""
        longest = [next(iter(m.waiting.values()), None) for m in self._memories.values()]
        moments = [
            context.since + memory.keep
            for context, memory in zip(longest, self._memories.values(), strict=True)
            if context is not None and context.since is not None
        ]
        if parked_since is not None:
            moments.append(
                max(parked_since + AGED_SECONDS, self._aged_at + AGED_EVERY_SECONDS, now)
            )
        soonest = min(moments, default=math.inf)
        return soonest if soonest < math.inf else None

    # --- inside --------------------------------------------------------------------------------

    def _settle_in(self, rollout: _Rollout) -> None:
        if rollout.is_new:
            rollout.is_new = False
            self._new -= 1

    def _least(self) -> float:
        growth = GROWTH if self._finished >= _KNOWN_ROLLOUTS else GROWTH_UNKNOWN
        return growth * self.context_mean

    def _learn(self, prompt: int, sampled: int) -> None:
        self._turns += 1
        weight = max(_SMOOTH, 1 / self._turns)
        self._sampled += weight * (sampled - self._sampled)
        self._turn_context += weight * (prompt - self._turn_context)

    def _sync(self, now: float) -> None:
        """Let go of contexts that waited longer than they are kept; look at times anew."""
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_SECONDS
            self._refresh(now)
        for memory in self._memories.values():
            while memory.waiting:
                context = next(iter(memory.waiting.values()))
                assert context.since is not None, "those that wait know since when"
                if now - context.since < memory.keep:
                    break
                memory.cool(context)

    def _refresh(self, now: float) -> None:
        for memory in self._memories.values():
            cost = memory.costs.cost()
            if cost is None or not self._waits or not self._turn_context:
                continue
            shape = TurnShape(
                sampled=self._sampled,
                new=self._fresh,
                context=self._turn_context,
                window=memory.window,
                kv_tokens=FILL * memory.residency.kept,
            )
            keep, before = keep_seconds(cost, shape, self._waits), memory.keep
            memory.keep = keep
            if keep > before:
                self._rewarm(memory, now)

    def _rewarm(self, memory: Memory, now: float) -> None:
        """Count those again that waited too long by the time before and do not by the new one."""
        back = [
            context
            for context in self._contexts.values()
            if context.since is not None
            and now - context.since < memory.keep
            and (context.hot_on is None)
            and memory.residency.is_cached(context.history)
        ]
        waiting = [*memory.waiting.values(), *back]
        for context in back:
            memory.warm(context)
        memory.waiting = OrderedDict(
            (context.history, context)
            for context in sorted(waiting, key=lambda one: one.since or 0)
        )


def _old_rollout() -> _Rollout:
    """A rollout that was not started here (resumed): no room was kept for it."""
    rollout = _Rollout()
    rollout.is_new = False
    return rollout
