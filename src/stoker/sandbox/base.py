"""The contract of a sandbox backend; one suite holds every backend to it.

A *box* is made from a baseline under an execution policy. It keeps files between actions; each
action is a fresh set of processes in it. Every box is written down (``BoxLedger``) before it is
made and struck off after it is gone. The host side never follows the box: no path below a
workspace is opened by name.

The calls here are asynchronous and never hold the interpreter: waiting is done on descriptors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from stoker.errors import BranchUnavailable
from stoker.model.checkpoint import Checkpoint
from stoker.model.completion import Usage
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Rung
from stoker.model.tools import ExportResult, ReadResult, RunRequest, RunResult, Tests, Verdict


class Strength(msgspec.Struct, frozen=True, kw_only=True):
    """How far one limit holds on this host, as ``stoker doctor`` found by trying it."""

    limit: str
    """``memory``, ``cpu``, ``processes``, ``disk``, ``wall``, ``output``, ``network`` …"""
    level: str
    """``enforced``, ``best effort`` or ``absent``."""
    how: str
    """By which mechanism, or why not."""
    remedy: str = ""
    """What would make it ``enforced``; empty when it is."""


class BoxOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can give on this host, found by running its canary."""

    isolation: Isolation
    rung: Rung
    available: bool
    shared_kernel: bool
    strengths: tuple[Strength, ...] = ()
    missing: str = ""
    """Why it is not available, in one sentence."""
    remedy: str = ""
    """How to get it."""


class BoxRun(msgspec.Struct, frozen=True, kw_only=True):
    """One finished action in a box."""

    result: RunResult
    usage: Usage
    box_lost: bool = False
    """The box itself did not survive (a microVM whose guest died)."""


class Branch(NamedTuple):
    """One box that began as a copy of another."""

    box: "Box"
    digest: str
    """Of the state it began from; all branches of one call share it."""
    parent: str
    """Digest of the state the box it was branched off began from."""
    generation: int
    """One more than that box's."""


def not_offered(what: str, kind: str) -> BranchUnavailable:
    """Return the error of a backend that has no ``what`` (checkpoint, branch, restore)."""
    return BranchUnavailable(
        f'{kind} boxes cannot do {what}; nothing was done; use isolation = "namespace", or open '
        "another box and give it the same files"
    )


class Box(Protocol):
    """One box. Its actions are serial: the caller never runs two at once.

    **Cancellation:** cancelling ``run`` kills the action's processes before it returns; the files
    stay. ``destroy`` is never cancelled half-way.
    """

    box_id: str
    policy: ExecutionPolicy
    baseline: Baseline

    @property
    def lost(self) -> bool:
        """Whether it is known to have ended by itself; it can only be destroyed then."""
        ...

    async def run(self, request: RunRequest, *, timeout_seconds: float) -> BoxRun:
        """Run a program to its end, its limits or its timeout; all of its processes are then dead.

        Raises:
            BoxFailed: the program could not be started for a reason of ours.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write regular files beneath the workspace, parents made, never through a link.

        Raises:
            ToolRefused: a path leaves the workspace, meets a link, or the disk limit is reached.
        """
        ...

    async def read_file(self, path: str, *, bytes_max: int) -> ReadResult:
        """Read one regular file beneath the workspace."""
        ...

    async def export(self, paths: tuple[str, ...], *, bytes_max: int) -> ExportResult:
        """Copy regular files out; links, devices and pipes are refused with the reason."""
        ...

    async def checkpoint(self, directory: Path) -> Checkpoint:
        """Write its state as one file ``directory / digest``; the box goes on as it was.

        No action runs meanwhile: it counts as one. Equal states make equal files. Nothing of a
        state can harm whoever restores it: no setuid bits, devices or attributes are in it. The
        file is complete or absent, and the caller's to remove or keep; it is not synced.

        Raises:
            BranchUnavailable: this kind of box has no checkpoints; nothing was done.
            ToolRefused: what is in the box cannot be kept (too deep, over its limits); it goes on.
            BoxFailed: it could not be written; nothing of it is left.

        **Cancellation:** nothing is left in ``directory``.
        """
        ...

    async def branch(self, count: int) -> tuple[Branch, ...]:
        """Make ``count`` boxes that begin in its state, under its policy and limits; all or none.

        No action runs meanwhile: it counts as one. Each has a name, an identity and randomness of
        its own, and lives on when this one goes; the caller destroys it.

        Raises:
            BranchUnavailable, ToolRefused: as for ``checkpoint``.
            BoxFailed: one could not be made; none is left.

        **Cancellation:** none is left.
        """
        ...

    async def destroy(self) -> None:
        """Kill, unmount, remove; afterwards nothing of the box is left. Safe to repeat."""
        ...


class Backend(Protocol):
    """One kind of isolation on this host."""

    async def offer(self) -> BoxOffer:
        """Run the canary (a few seconds at most) and say what can be given."""
        ...

    def check(self, policy: ExecutionPolicy) -> None:
        """Refuse a policy that this backend cannot give on any host.

        Raises:
            IsolationUnavailable: what it lacks, and what would give it.
        """
        ...

    async def create(self, box_id: str, baseline: Baseline, policy: ExecutionPolicy) -> Box:
        """Make a box.

        Raises:
            IsolationUnavailable: this host cannot give the policy; nothing is weakened.
            BoxFailed: making it failed; nothing of it is left.
        """
        ...

    async def restore(
        self, box_id: str, baseline: Baseline, policy: ExecutionPolicy, checkpoint: Checkpoint
    ) -> Box:
        """Make a box in the state of ``checkpoint.file``, which is read and left as it is.

        Raises:
            BranchUnavailable: this backend has no checkpoints, or none of this kind.
            IsolationUnavailable: this host cannot give the policy, or not that baseline.
            ArtifactDamaged: the file is not what its digest says; nothing was made.
            BoxFailed: making it failed; nothing of it is left.
        """
        ...

    async def judge(
        self,
        box_id: str,
        files: Mapping[str, bytes],
        tests: Tests,
        *,
        policy: ExecutionPolicy,
        timeout_seconds: float,
    ) -> tuple[Verdict, Usage]:
        """Grade ``files`` against ``tests``: judge and solution in two boxes of their own.

        Raises:
            BoxFailed: an infrastructure fault; never a verdict.
        """
        ...

    async def sweep(self) -> int:
        """Remove what dead incarnations left; return how many boxes were found and removed."""
        ...

    async def close(self) -> None:
        """Destroy every box and let go of leased uids."""
        ...
