"""Baselines with files and set-up commands: built once per machine, kept by content, then copied.

A *recipe* is what a baseline is made of: the files, the commands, the interpreter, the kind of box.
Its result is the state of the box in which the commands ran, kept beside the runtime files; boxes
made from the baseline begin in it. One process builds at a time, the others wait and find it.
A directory of files is read once by each process: what changes in it meanwhile is not seen.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stoker.errors import BoxFailed, ConfigInvalid, IsolationUnavailable
from stoker.model.execution import Baseline, BaselineBuild, ExecutionPolicy
from stoker.model.tools import RunRequest
from stoker.model.value import canonical_digest
from stoker.sandbox import runtime
from stoker.sandbox.base import Box, not_offered
from stoker.sandbox.baseline_cache import prune, read_recipe
from stoker.sandbox.branching import Beginning, bounds_of
from stoker.sandbox.entries import Bounds, Unkept
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.roots import BYTES_MAX, TREE, Root, Roots, through_link
from stoker.sandbox.states import pack
from stoker.seams.entropy import fresh_id
from stoker.seams.faultpoints import declare, reach

if TYPE_CHECKING:
    from stoker.sandbox.host import SandboxHost

BUILT = declare("box.state.built", "a baseline is built and its recipe names what has no place yet")

_OUTPUT_SHOWN = 300
_MADE_OF_MAX = 500
_PACKAGES = "a directory of Python packages (pip install --target), or a virtual environment"
_SOURCE = Bounds(bytes_max=1 << 34, entries_max=1_000_000)
"""What is read of a directory at most; the policy of the box bounds it further."""


class Builds(Protocol):
    """A backend whose boxes begin empty or in what a baseline was built to."""

    host: "SandboxHost"
    rooted: bool
    """Whether its boxes can have a root file system and packages of their own."""

    @property
    def kind(self) -> str:
        """What tells its boxes from others: equal lines make other things in another kind."""
        ...

    async def make(
        self,
        box_id: str,
        baseline: Baseline,
        policy: ExecutionPolicy,
        *,
        begins: Beginning | None = None,
    ) -> Box:
        """Make a box; raises what ``base.Backend.create`` raises."""
        ...


class Baselines:
    """Builds and finds the states of baselines on this machine."""

    def __init__(self, directory: Path, roots: Path | None = None) -> None:
        self._directory = directory
        self.bytes_max = BYTES_MAX
        """What all of it may take; what living boxes are made of stays, whatever it takes."""
        self.roots = Roots(roots or directory / "roots")
        # Directories of packages lie among them, made, held and removed alike.
        self.packages = Roots(self.roots.directory, forms=_PACKAGES, kind="packages")
        for made in (self.roots, self.packages):
            made.after_making = self.trim
        self._sources: dict[str, str] = {}
        """Directory → digest of what lies in it."""
        self._building = asyncio.Lock()

    def allow(self, bytes_max: int) -> None:
        """Let all of it, and any one root, take so much."""
        self.bytes_max = self.roots.bytes_max = self.packages.bytes_max = bytes_max

    def release(self, box_id: str) -> None:
        """Let go of what a box is made of; safe to repeat."""
        self.roots.release(box_id)
        self.packages.release(box_id)

    async def close(self) -> None:
        """Stop what is being made and let go of everything."""
        await asyncio.gather(self.roots.close(), self.packages.close())

    def trim(self) -> None:
        """Remove what was used least recently, if there is too much. Blocks.

        Raises:
            OSError: something could not be removed.
        """
        prune(self.bytes_max, states=self._directory, roots=self.roots.directory)

    async def source_digest(self, build: BaselineBuild) -> str:
        """Return the digest of the files of ``build``.

        Raises:
            ConfigInvalid: they cannot be read.
        """
        if build.files and build.files not in self._sources:
            packed = await asyncio.to_thread(_packed, build.files, _SOURCE, keep=False)
            self._sources[build.files] = packed[0]
        return self._sources.get(build.files, "")

    async def key(self, baseline: Baseline) -> str:
        """Return what tells this baseline's build from others, on any host; empty: it has none."""
        build = baseline.build
        if build is msgspec.UNSET:
            return ""
        return canonical_digest([await self.source_digest(build), build.setup])

    async def pinned(
        self, backend: Builds, box_id: str, baseline: Baseline, policy: ExecutionPolicy
    ) -> Baseline:
        """Return ``baseline`` with its digest on this host; what it is made of is held for the box.

        Raises:
            BranchUnavailable: boxes of ``backend`` have no root or packages of their own.
            IsolationUnavailable: it is pinned to another digest, has no way out to a network,
                a link of its root lies where the policy mounts something, or this host's
                interpreter takes no packages.
            ConfigInvalid: its files or packages cannot be read.
        """
        root = ""
        if baseline.root is not msgspec.UNSET:
            if not backend.rooted:
                raise not_offered("baselines with a root of their own", backend.kind)
            if policy.network:
                raise IsolationUnavailable(
                    f"baseline {baseline.name!r} has a root file system of its own, and the way "
                    "out to a network needs the host's interpreter in the box; leave the network "
                    "out of the policy"
                )
            held = await self.roots.hold(box_id, baseline.root)
            root = held.digest
            for mount in policy.mounts:
                # A mount point made through it would lie wherever on the host the image says.
                if through_link(held, mount.target):
                    raise IsolationUnavailable(
                        f"baseline {baseline.name!r} has a link on the way to {mount.target}; "
                        "mount it at another place"
                    )
        packages = await self._packages(backend, box_id, baseline)
        build = await self.key(baseline)
        digest = backend.host.baseline_digest(baseline, build=build, root=root, packages=packages)
        if baseline.digest and baseline.digest != digest:
            raise IsolationUnavailable(
                f"baseline {baseline.name!r} was pinned as {baseline.digest}, this host has "
                f"{digest}; use the interpreter or the image the run was made with"
            )
        return msgspec.structs.replace(baseline, digest=digest)

    async def _packages(self, backend: Builds, box_id: str, baseline: Baseline) -> str:
        """Return the digest of its packages, held for the box from now on; empty: it has none."""
        if baseline.packages is msgspec.UNSET:
            return ""
        if not backend.rooted:
            raise not_offered("baselines with packages", backend.kind)
        if baseline.root is not msgspec.UNSET:
            raise ConfigInvalid(
                f"baseline {baseline.name!r} has packages and a root of its own; packages are for "
                "the host's interpreter: leave one of the two out"
            )
        if not runtime.inside_packages():
            raise IsolationUnavailable(
                f"baseline {baseline.name!r} has packages, and this worker runs in the system's "
                "interpreter, which looks for them among the system's own; run it in another "
                "(pyenv, uv python install)"
            )
        held = await self.packages.hold(box_id, runtime.packages_directory(baseline.packages))
        if not held.digest.startswith(TREE):
            self.packages.release(box_id)
            raise ConfigInvalid(f"{baseline.packages} is a saved image; name {_PACKAGES}")
        return held.digest

    async def built(
        self, backend: Builds, box_id: str, baseline: Baseline, policy: ExecutionPolicy
    ) -> Path | None:
        """Return the file of the state that boxes of ``baseline`` begin in; ``None``: empty ones.

        Raises:
            ConfigInvalid: its files cannot be read, or a command of its set-up failed.
            BoxFailed: the box of its set-up could not be made.
        """
        build = baseline.build if baseline.build is not msgspec.UNSET else BaselineBuild()
        if baseline.root is msgspec.UNSET or not backend.rooted:
            return await self._built(backend, box_id, baseline, build, policy, None)
        # Held while its working directory is read; by the box of this id from then on.
        root = await self.roots.hold(box_id, baseline.root)
        try:
            return await self._built(backend, box_id, baseline, build, policy, root)
        finally:
            self.roots.release(box_id)

    async def _built(
        self,
        backend: Builds,
        box_id: str,
        baseline: Baseline,
        build: BaselineBuild,
        policy: ExecutionPolicy,
        root: Root | None,
    ) -> Path | None:
        source = await self.source_digest(build)
        if root is not None and root.directory and not build.files:
            source = root.digest
            build = msgspec.structs.replace(build, files=root.tree + root.directory)
        if not build.files and not build.setup:
            return None
        parts = [source, build.setup, baseline.environment, policy.network, backend.kind]
        key = root.digest if root is not None else backend.host.runtime.key
        if packages := await self._packages(backend, box_id, baseline):
            parts.append(packages)
            self.packages.release(box_id)  # the box that is made next holds them again
        recipe = self._directory / f"recipe-{canonical_digest([*parts, key])}"
        made = msgspec.structs.replace(baseline, build=build)
        async with self._building:
            if (found := _found(recipe)) is not None:
                return found
            async with _locked(recipe.with_suffix(".lock")):
                if (found := _found(recipe)) is None:
                    drafted = await self._build(backend, made, policy, recipe)
                    found = await asyncio.to_thread(_name, recipe, drafted, _made_of(baseline))
                    await asyncio.to_thread(self.trim)
                return found

    async def _build(
        self, backend: Builds, baseline: Baseline, policy: ExecutionPolicy, recipe: Path
    ) -> Path:
        build = baseline.build
        assert build is not msgspec.UNSET, "only what has a recipe is built"
        begins = None
        if build.files:
            bounds = bounds_of(policy.limits)
            digest, content = await asyncio.to_thread(_packed, build.files, bounds, keep=True)
            begins = Beginning(BytesIO(content), digest, 0)
        plain = msgspec.structs.replace(
            baseline, name=Baseline().name, build=msgspec.UNSET, digest=""
        )
        # What it may reach stays; what it could leave somewhere else does not.
        alone = msgspec.structs.replace(policy, mounts=())
        box = await backend.make(fresh_id("box_"), plain, alone, begins=begins)
        try:
            for number, line in enumerate(build.setup, start=1):
                await _set_up(box, baseline.name, number, line, build.timeout_seconds)
            # The recipe's lock is ours, and so is what a killed process left of building it.
            drafts = recipe.with_suffix(".part")
            await asyncio.to_thread(remove_tree, drafts)
            drafts.mkdir(mode=0o700)
            saved = await box.checkpoint(drafts)
        finally:
            await asyncio.shield(box.destroy())
        return Path(saved.file)


async def _set_up(box: Box, name: str, number: int, line: str, seconds: float) -> None:
    request = RunRequest(argv=("/bin/sh", "-c", line))
    run = await box.run(request, timeout_seconds=seconds)
    result = run.result
    if run.box_lost:
        raise BoxFailed(
            f"baseline {name!r} could not be built: the box in which command {number} of its setup "
            "ran was lost; nothing was made from it; the next box builds it again"
        )
    if not result.ok:
        said = result.text[-_OUTPUT_SHOWN:].replace("\n", " ")
        raise ConfigInvalid(
            f"baseline {name!r} could not be built: command {number} of its setup ({line!r}) "
            f"failed: {said}; nothing was made from it"
        )


def _packed(directory: str, bounds: Bounds, *, keep: bool) -> tuple[str, bytes]:
    """Return digest and (to be kept) content of what lies in a directory, as a workspace."""
    into = BytesIO() if keep else _Nowhere()
    try:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            digest = pack({b"workspace": opened}, into, bounds).digest
        finally:
            os.close(opened)
    except (OSError, Unkept) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigInvalid(
            f"the files of a baseline cannot be taken from {directory}: {why}; name a directory "
            "that this worker can read"
        ) from error
    return digest, into.getvalue()


class _Nowhere(BytesIO):
    """Takes what is only to be digested."""

    def write(self, content: object, /) -> int:
        """Let go of it."""
        return len(content)  # type: ignore[arg-type]


def _found(recipe: Path) -> Path | None:
    """Return the state that a recipe names, if both are there."""
    try:
        state = recipe.with_name(read_recipe(recipe)[0])
    except FileNotFoundError:
        return None
    if not state.exists():
        return None
    os.utime(recipe)  # used now: others go before it
    return state


def _made_of(baseline: Baseline) -> str:
    """Return what people know a baseline by, in one line: it is no part of any digest."""
    build = baseline.build if baseline.build is not msgspec.UNSET else BaselineBuild()
    parts = [f"files {build.files}"] if build.files else []
    for what, path in (("root", baseline.root), ("packages", baseline.packages)):
        parts += [f"{what} {path}"] if path is not msgspec.UNSET else []
    said = "; ".join((*parts, *build.setup))
    return " ".join(f"{baseline.name}: {said}".split())[:_MADE_OF_MAX]


def _name(recipe: Path, drafted: Path, made_of: str) -> Path:
    """Let ``recipe`` name a drafted state and put that in its place.

    In this order: a state that no recipe names would be counted and removed by nobody.
    """
    draft = drafted.with_name("recipe")
    draft.write_text(f"{drafted.name}\n{made_of}", encoding="utf-8", errors="replace")
    for written in (drafted, draft):
        with written.open("rb") as content:
            os.fsync(content.fileno())
    draft.replace(recipe)
    reach(BUILT)
    state = drafted.replace(recipe.with_name(drafted.name))
    drafted.parent.rmdir()
    return state


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
