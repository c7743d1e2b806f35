"""Checkpoints: states of a box that can be had again, named by their content.

A box stands in a line of boxes: made from a baseline (generation 0), branched off another or made
from a checkpoint (one more than that). A digest names content, so it can be checked wherever it is
read; parents are named by it too, which makes the line a chain of digests.
"""

from enum import StrEnum

import msgspec


class StateKind(StrEnum):
    """What a checkpoint or branch takes along."""

    FILES = "files"
    """What the box keeps between actions; no process."""
    MEMORY = "memory"
    """Files, memory and processes of a guest."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One restorable state of a box."""

    digest: str
    """Content address of ``file`` (``model.value.content_digest``): blake2b-256, hex."""
    parent: str
    """Digest of the state its box began from: of its baseline, or of a checkpoint."""
    generation: int
    """Branches and restorations between a box made from the baseline and the one it is of."""
    kind: StateKind = StateKind.FILES
    size_bytes: int = 0
    """Length of ``file``."""
    file: str = ""
    """Path of the content on this host; empty once it is kept elsewhere by its digest."""
    left_out: tuple[str, ...] = ()
    """What it does not hold, each with the reason (sockets, devices); the first few."""
    interrupted: bool = False
    """An action was cut short before it; programs that begin there are told, as in its box."""
