"""Where training stands, read from its journal of deliveries. Pure: no ledger, clock or loop.

Invariant: the book after *n* events is a function of those events alone, so a trainer's state is
just ``n`` and a digest of them (design 0013).
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from stoker.model.deliveries import (
    Committed,
    DeliveryEvent,
    HandedOut,
    Published,
    Rewound,
    encode_delivery,
)
from stoker.model.ids import GroupId

_DIGEST_BYTES = 10


class Standing(NamedTuple):
    """What a rewind brings back."""

    committed: frozenset[GroupId]
    line: tuple[int, ...]


class DeliveryBook:
    """The events so far, folded."""

    def __init__(self) -> None:
        self.position = 0
        """How many events it has read."""
        self.digest = ""
        """Of all of them, in order."""
        self.handed: dict[GroupId, int] = {}
        """Group → hand-outs so far, rewound ones included; in order of the first."""
        self.open: dict[GroupId, int] = {}
        """Handed out and not committed, with the number of the latest hand-out."""
        self.committed: set[GroupId] = set()
        self.line: list[int] = []
        """Versions published on the line of training that holds, rising."""
        self.published: list[int] = []
        """Every version ever published, rising."""

    def standing(self) -> Standing:
        """Return what a later rewind to here brings back."""
        return Standing(frozenset(self.committed), tuple(self.line))

    @property
    def policy_version(self) -> int | None:
        """The version published last; ``None``: none was."""
        return self.line[-1] if self.line else None

    def abandoned(self, version: int) -> bool:
        """Whether ``version`` was published on a line that a rewind left."""
        at = bisect_right(self.published, version)
        return at > 0 and self.published[at - 1] == version and version not in self.line

    def lag(self, version: int) -> int:
        """Return how many versions of this line were published after ``version``.

        A version that was never published is what the model began with: all of them were.
        """
        known = bisect_right(self.published, version)
        if not known or self.published[known - 1] != version:
            return len(self.line)
        return len(self.line) - bisect_right(self.line, version)

    def apply(self, event: DeliveryEvent, then: Standing | None = None) -> None:
        """Take one event in; ``then``: how things stood where a ``Rewound`` goes back to."""
        match event:
            case HandedOut():
                self.handed[event.group_id] = self.open[event.group_id] = event.number
            case Committed():
                self.open.pop(event.group_id, None)
                self.committed.add(event.group_id)
            case Published():
                if event.version not in self.line:
                    self.line.append(event.version)
                if event.version not in self.published:
                    insort(self.published, event.version)
            case Rewound():
                assert then is not None, "a rewind goes back to a position that was read"
                # What is open was handed out on a line that is gone: it is to be handed out again.
                self.open, self.committed, self.line = {}, set(then.committed), list(then.line)
        self.position += 1
        content = self.digest.encode() + encode_delivery(event)
        self.digest = blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def read_book(events: Sequence[DeliveryEvent]) -> DeliveryBook:
    """Return the book after ``events``, read once however often a trainer came back."""
    wanted = {event.position for event in events if isinstance(event, Rewound)}
    stood: dict[int, Standing] = {}
    book = DeliveryBook()
    for event in events:
        if book.position in wanted:
            stood[book.position] = book.standing()
        book.apply(event, stood[event.position] if isinstance(event, Rewound) else None)
    return book
