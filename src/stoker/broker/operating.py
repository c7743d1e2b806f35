"""What operators ask of a ledger: copies, compaction, dead letters, and what was done before.

Part of the contract in ``base``. Whoever may connect may ask; every change leaves an audit entry.
"""

from enum import StrEnum

import msgspec

from stoker.model.ids import ActionId, RunId

COPY_PAGES = 512
"""Pages copied between two groups of requests: a few milliseconds."""


class CopyRequest(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """Copy some more of the open database into ``path``; asked again until nothing remains.

    A request for another path begins anew. What is committed meanwhile is copied too, so that the
    copy is the ledger as of the last request. Not synced: whoever asked syncs the file.
    """

    path: str
    """Absolute; a file of the owner's user."""
    pages: int = COPY_PAGES


class CopyReply(msgspec.Struct, frozen=True, kw_only=True, tag="copy_reply"):
    """How far the copy is."""

    remaining: int
    """Pages; 0: the file is complete."""
    total: int


class CompactRequest(msgspec.Struct, frozen=True, kw_only=True, tag="compact"):
    """Fold the write-ahead log into the file and give unused pages back to the disk.

    Nothing is forgotten: tombstones keep ids and fences for ever. Refused while anything is in
    workers' hands, since rewriting a large file keeps everybody waiting.
    """


class CompactReply(msgspec.Struct, frozen=True, kw_only=True, tag="compact_reply"):
    """Bytes of database and write-ahead log."""

    bytes_before: int
    bytes_after: int


class DeadLetterVerb(StrEnum):
    """What an operator does with dead letters."""

    REQUEUE = "requeue"
    """Queue it again with fresh attempts; only while no coordinator has applied its result."""
    DROP = "drop"
    """Forget input and result; only once a coordinator has applied its result."""


class SettleDead(msgspec.Struct, frozen=True, kw_only=True, tag="settle_dead"):
    """Requeue or drop dead letters; each is decided for itself."""

    run_id: RunId
    verb: DeadLetterVerb
    action_ids: tuple[ActionId, ...]
    who: str
    """For the audit: a person or a program."""
    reason: str = ""


class SettledDead(msgspec.Struct, frozen=True, kw_only=True, tag="settled_dead"):
    """Per action: nothing when it was done, else one sentence why not."""

    refused: dict[ActionId, str]


class AuditRequest(msgspec.Struct, frozen=True, kw_only=True, tag="audit"):
    """Ask what operators did to a run and to its ledger as a whole, oldest first."""

    run_id: RunId


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing an operator did."""

    at: float
    """Wall time, seconds since 1970."""
    who: str
    what: str
    """``requeued``, ``dropped`` or ``restored``."""
    run_id: RunId | None
    """``None``: the ledger as a whole."""
    action_id: ActionId | None
    detail: str


class AuditReply(msgspec.Struct, frozen=True, kw_only=True, tag="audit_reply"):
    """Entries in order."""

    entries: tuple[AuditEntry, ...]


OperatorRequest = CopyRequest | CompactRequest | SettleDead | AuditRequest
OperatorReply = CopyReply | CompactReply | SettledDead | AuditReply
OUTSIDE_GROUPS = (CopyRequest, CompactRequest)
"""Carried out between two transactions, since SQLite allows neither within one."""
