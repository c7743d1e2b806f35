"""Between a coordinator and the trainer that embeds it: complete groups out, commits in.

Holds ids only; whoever hands a group out reads its journals (``training``). Order: what was handed
out before and not committed, oldest first, then the others as they were completed. While
``training.unread_max`` groups wait here unread, no new group is begun.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

import msgspec

from stoker.broker.base import Ledger
from stoker.config.tree import TrainingSettings
from stoker.coordinator.delivery_book import DeliveryBook
from stoker.coordinator.delivery_log import DeliveryLog
from stoker.coordinator.groups import Groups, LengthBias
from stoker.errors import BadInput, DeliveryUnknown, StateRefused
from stoker.model.deliveries import Committed, HandedOut, Published, Rewound
from stoker.model.ids import GroupId, RolloutId, RunId


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer stands; as JSON it lives in its checkpoint."""

    run: RunId
    partition: str
    position: int
    """How many events of the journal of deliveries it covers."""
    digest: str
    """Of those events."""
    policy_version: int | None
    """Published last; for people."""


class GroupFeed:
    """One partition's complete groups, for one trainer."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._begun: DeliveryLog | None = None
        self._run_id = RunId("")
        self._partition = ""
        self._groups: Groups
        """Set by ``begin``, as are the three before."""
        self._unread: dict[GroupId, None] = {}
        """In order."""
        self._news = asyncio.Event()
        self._taking = asyncio.Lock()
        self._handing: GroupId | None = None
        """Being written as handed out."""
        self._committing: set[GroupId] = set()
        """Being written as committed: they do not come again meanwhile."""
        self._over = False
        self._failure: BaseException | None = None
        self.ready = asyncio.Event()
        """Groups can be had."""
        self.left = asyncio.Event()
        """The trainer has gone."""
        self.taken: Callable[[], None] = lambda: None
        """Told when a group was taken, so that admission may go on."""

    @property
    def _log(self) -> DeliveryLog:
        assert self._begun is not None, "a trainer is let in when the run has begun"
        return self._begun

    @property
    def _book(self) -> DeliveryBook:
        return DeliveryBook() if self._begun is None else self._begun.book

    # --- the coordinator's side ------------------------------------------------------------------

    async def begin(self, ledger: Ledger, run_id: RunId, partition: str, groups: Groups) -> None:
        """Own the journal of deliveries; ``groups`` knows what an earlier coordinator left."""
        self._run_id, self._partition, self._groups = run_id, partition, groups
        self._begun = await DeliveryLog.open(ledger, run_id, partition)
        self._queue(groups.complete)
        self.ready.set()

    def completed(self, group: GroupId) -> None:
        """Queue a group that is complete now; its outcomes may still be on their way to disk."""
        self._unread.setdefault(group)
        self._news.set()

    @property
    def full(self) -> bool:
        """Whether no new group should be begun: the trainer does not read."""
        return len(self._unread) >= self._settings.unread_max

    def no_more(self) -> None:
        """Say that every group there will be is here."""
        self._over = True
        self._news.set()

    def more(self) -> None:
        """Say that there will be more groups after all; nobody can have waited meanwhile."""
        self._over = False

    def failed(self, error: BaseException) -> None:
        """Say that the run has ended with ``error``; whoever waits for a group gets it."""
        self._failure = error
        self._news.set()

    def stale(self, versions: Iterable[int]) -> str:
        """Return why a rollout sampled under ``versions`` is cut, or nothing."""
        allowed = self._settings.staleness_max
        if allowed is None:
            return ""
        oldest = max(versions, key=self._book.lag, default=None)
        if oldest is None or (lag := self._book.lag(oldest)) <= allowed:
            return ""
        return (
            f"staleness: tokens of policy version {oldest}, {lag} versions behind "
            f"{self.policy_version} (training.staleness_max is {allowed})"
        )

    # --- the trainer's side ----------------------------------------------------------------------

    @property
    def policy_version(self) -> int | None:
        """The version published last; ``None``: none was."""
        return self._book.policy_version

    @property
    def next_policy_version(self) -> int:
        """The smallest number that no policy has had; 0 is what the model began with."""
        return max(self._book.published, default=0) + 1

    def abandoned(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Return those of ``versions`` that belong to a policy which was given up, rising."""
        return tuple(sorted({one for one in versions if self._book.abandoned(one)}))

    def again(self) -> None:
        """Queue what was handed out and not committed once more, before everything else."""
        left = [group for group in self._book.open if group not in self._committing]
        self._unread = dict.fromkeys([*left, *self._unread])

    async def take(self) -> tuple[GroupId, int] | None:
        """Wait for the next group and hand it out; return it with the number of the hand-out.

        ``None``: there will be none any more. Raises what ended the run.

        **Durability:** the hand-out is on disk. **Cancellation:** the group is still to be had.
        """
        async with self._taking:
            while self._failure is None and not self._unread:
                if self._over:
                    return None
                self._news.clear()
                await self._news.wait()
            if self._failure is not None:
                raise self._failure
            group = next(iter(self._unread))
            number = self._book.handed.get(group, 0) + 1
            self._handing = group
            try:
                await self._log.append(HandedOut(group_id=group, number=number))
            finally:
                self._handing = None
            self._unread.pop(group, None)
            self.taken()
            return group, number

    def members(self, group: GroupId) -> tuple[RolloutId, ...]:
        """Return every rollout of a complete group that has ended."""
        return self._groups.members(group)

    @property
    def bias(self) -> LengthBias:
        """What cutting stragglers off has cost so far."""
        return self._groups.bias

    async def commit(self, group: GroupId, number: int) -> None:
        """Let a group never come again. Doing so twice is harmless.

        Raises:
            DeliveryUnknown: it is no hand-out that can be answered now.

        **Durability:** on disk when this returns. **Cancellation:** it is committed all the same.
        """
        book = self._book
        if group in book.committed and book.handed.get(group) == number:
            return
        handed = book.handed.get(group, 0) + (self._handing == group)
        if book.open.get(group) != number or handed > number:
            raise DeliveryUnknown(
                f"delivery {number} of group {group} cannot be committed: "
                + (
                    f"the group was handed out again since, as {handed}"
                    if handed > number
                    else "it was not handed out, or a restore has taken it back"
                )
                + "; nothing was changed; commit what groups() gave last"
            )
        self._unread.pop(group, None)  # ``again`` may have queued it
        self._committing.add(group)
        event = Committed(group_id=group, number=number)
        await self._log.append(event, lambda: self._commit_ended(group))

    def _commit_ended(self, group: GroupId) -> None:
        self._committing.discard(group)
        if group in self._book.committed:
            self._groups.forget(group)

    def state(self) -> TrainingState:
        """Return where the trainer stands."""
        book = self._book
        return TrainingState(
            run=self._run_id,
            partition=self._partition,
            position=book.position,
            digest=book.digest,
            policy_version=book.policy_version,
        )

    async def restore(self, state: TrainingState, fresh: Groups) -> None:
        """Stand where ``state`` was taken; ``fresh`` knows every complete group of the run.

        Raises:
            StateRefused: it is another run's, or of a past that this ledger does not have.
        """
        if (state.run, state.partition) != (self._run_id, self._partition):
            raise StateRefused(
                f"this state is of run {state.run}, partition {state.partition}, not of "
                f"{self._run_id}, {self._partition}; nothing was changed"
            )
        if state != self.state():
            await self._log.require(state.position, state.digest)
            await self._log.append(Rewound(position=state.position))
        self._groups.take_over(fresh)
        self._unread = {}
        self._queue(self._groups.complete)
        self._news.set()

    async def publish(self, version: int) -> None:
        """Write down that ``version`` is about to be the policy.

        Raises:
            BadInput: the number was used before.
        """
        book = self._book
        if version != book.policy_version and book.published and version <= book.published[-1]:
            raise BadInput(
                f"policy version {version} cannot be published: numbers are used once, and "
                f"{book.published[-1]} was the highest so far"
                + (" (by a policy that was given up)" if book.abandoned(book.published[-1]) else "")
                + f"; nothing was changed; publish {book.published[-1] + 1} or more"
            )
        await self._log.append(Published(version=version))

    # --- both ------------------------------------------------------------------------------------

    def _queue(self, complete: Mapping[GroupId, float]) -> None:
        """Queue every complete group that is not committed: what was handed out goes first."""
        book = self._book
        left = sorted(complete.keys() - book.committed, key=lambda group: complete[group])
        handed = [group for group in book.handed if group in complete]
        self._unread = dict.fromkeys(g for g in (*handed, *left) if g not in book.committed)
        for group in book.committed:
            self._groups.forget(group)
