"""Where a rollout and its environments began, read from its journal: ``stoker show --tree``."""

from collections.abc import Sequence

import msgspec
from rich.tree import Tree

from stoker.cli.output import counted
from stoker.cli.summaries import Read
from stoker.cli.text import cell
from stoker.errors import InternalError
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import (
    BRANCHED,
    Admitted,
    BranchedFrom,
    Delivered,
    Issued,
    JournalEvent,
    Restored,
    Verb,
)
from stoker.model.ids import CallPath, RolloutId
from stoker.model.tools import OpenResult
from stoker.rollout.arguments import BoxArguments, EnvironmentArguments

_DIGITS = 16


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of an environment."""

    path: CallPath
    step: int
    digest: str
    parent: str
    """Of the state its box began from."""
    generation: int


class Lived(msgspec.Struct, kw_only=True):
    """One environment."""

    path: CallPath
    step: int
    """Model calls that were answered before it was opened."""
    baseline: str
    baseline_digest: str
    parent: CallPath | None
    """The environment it was branched off."""
    began_from: str
    """Digest of the checkpoint it began with; empty: the baseline."""
    generation: int
    """Branches between it and a baseline."""
    rebuilt: int = 0
    """How often a box of it was lost and had again."""
    checkpoints: list[Kept] = []


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout."""

    rollout_id: RolloutId
    task: str
    index: int
    epoch: str
    branched: BranchedFrom | None
    """``None``: the run itself began it."""
    environments: tuple[Lived, ...]
    """Each after the one it was branched off, and otherwise as the program opened them."""


def lineage(events: Sequence[JournalEvent], read: Read) -> Lineage:
    """Return where a rollout and its environments began; what cannot be read is left out."""
    first = events[0] if events else None
    if not isinstance(first, Admitted):
        raise InternalError("the journal does not begin with an admission; nothing was shown")
    issued: dict[CallPath, Issued] = {}
    found: dict[CallPath, Lived] = {}
    steps = 0
    for event in events:
        if isinstance(event, Issued):
            issued[event.path] = event
        elif isinstance(event, Restored) and event.path in found:
            found[event.path].rebuilt += event.reason != BRANCHED
        elif isinstance(event, Delivered) and event.value is not None:
            call = issued[event.path]
            steps += call.verb is Verb.GENERATE
            asked, got = read(call.arguments), read(event.value)
            if asked is None or got is None:
                continue
            if call.verb is Verb.ENVIRONMENT:
                found[event.path] = _lived(event.path, steps, asked, got)
            elif call.verb is Verb.CHECKPOINT:
                of = msgspec.msgpack.decode(asked, type=BoxArguments).environment
                if of in found:
                    found[of].checkpoints.append(_kept(event.path, steps, got))
    return Lineage(
        rollout_id=first.rollout_id,
        task=first.task.task_id,
        index=first.index,
        epoch=first.epoch,
        branched=None if first.branched is msgspec.UNSET else first.branched,
        # Branches asked for at once are delivered in any order; the program knows only its own.
        environments=tuple(
            sorted(found.values(), key=lambda one: (one.generation, _verbs(one.path)))
        ),
    )


def tree(told: Lineage) -> Tree:
    """Return ``told`` for people: environments below those they were branched off."""
    top = Tree(cell(f"{told.rollout_id}  {told.task} #{told.index}"))
    if told.branched is not None:
        of = told.branched
        shares = f"shares {counted(of.step, 'step')}, {of.entries} entries {of.digest[:_DIGITS]}"
        top.add(cell(f"branch of {of.parent}: {shares}, generation {of.generation}", "yellow"))
    nodes: dict[CallPath, Tree] = {}
    for one in told.environments:
        above = nodes.get(one.parent, top) if one.parent is not None else top
        began = (
            f"from checkpoint {one.began_from[:_DIGITS]}, generation {one.generation}"
            if one.began_from
            else f"from baseline {one.baseline} {one.baseline_digest[:_DIGITS]}"
        )
        again = f", rebuilt {counted(one.rebuilt, 'time')}" if one.rebuilt else ""
        node = nodes[one.path] = above.add(
            cell(f"environment {one.path}  step {one.step}, {began}{again}")
        )
        for kept in one.checkpoints:
            node.add(cell(f"checkpoint {kept.digest[:_DIGITS]}  step {kept.step}", "dim"))
    return top


def _verbs(path: CallPath) -> tuple[int, ...]:
    return tuple(map(int, path.split(".")))


def _lived(path: CallPath, step: int, asked: bytes, got: bytes) -> Lived:
    arguments = msgspec.msgpack.decode(asked, type=EnvironmentArguments)
    begins = None if arguments.begins is msgspec.UNSET else arguments.begins
    return Lived(
        path=path,
        step=step,
        baseline=arguments.baseline,
        baseline_digest=msgspec.msgpack.decode(got, type=OpenResult).baseline_digest,
        parent=None if begins is None else begins.environment,
        began_from="" if begins is None else begins.checkpoint.digest,
        generation=0 if begins is None else begins.checkpoint.generation + 1,
    )


def _kept(path: CallPath, step: int, got: bytes) -> Kept:
    saved = msgspec.msgpack.decode(got, type=Checkpoint)
    return Kept(
        path=path,
        step=step,
        digest=saved.digest,
        parent=saved.parent,
        generation=saved.generation,
    )
