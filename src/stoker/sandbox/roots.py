"""Root file systems of baselines: unpacked once per machine, kept by content, seen read-only.

A root is named by what it holds: the digest of an image's configuration, or of a directory's
content. It is made aside, synced, and renamed into its place, so it is complete or absent; one
process makes it under a lock and the others find it. Each living box holds a shared lock on the
root it is made of; who removes roots takes the exclusive one, so none in use is ever removed.

Making goes on though whoever asked gives up meanwhile: the next who asks finds it further on.
"""

import asyncio
import contextlib
import fcntl
import os
import platform
import posixpath
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.errors import BoxFailed, ConfigInvalid
from stoker.sandbox import kernel, saved_images, states
from stoker.sandbox.entries import Bounds, Unkept
from stoker.sandbox.layers import Tree
from stoker.sandbox.removal import remove_tree
from stoker.sandbox.runtime import make_public
from stoker.sandbox.saved_images import Image, Unusable
from stoker.sandbox.unpacking import unpack
from stoker.seams.faultpoints import declare, reach

UNPACKED = declare("root.unpacked", "a root file system is whole on the disk and has no name yet")

BYTES_MAX = 1 << 36
"""Of one root, where no budget says less."""
WORKSPACE = "/workspace"
OWN = frozenset({"dev", "proc", "sys", "tmp", "workspace", ".stoker"})
"""Names at the top that every box has of its own."""
_ENTRIES_MAX = 2_000_000
_PAUSE_SECONDS = 0.05
ABOUT = "about.json"
DRAFT = ".part"

Tell = Callable[[str], None]
TREE = "tree:"
"""Begins the digest of what was made from a directory."""
ROOT_FORMS = "an unpacked root file system, an OCI layout or what docker save wrote"


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """One root file system on this machine."""

    digest: str
    tree: str
    """Where it lies."""
    environment: dict[str, str] = {}
    """Variables its image sets."""
    directory: str = ""
    """The image's working directory, an absolute path without links; empty: none of its own."""
    size_bytes: int = 0
    kind: str = "root"
    """``root``, or ``packages``: what it was first wanted as."""
    made_of: str = ""
    """What it was made from, as it was named first; for people."""


class _Source(NamedTuple):
    """What a root is made from."""

    path: Path
    digest: str
    image: Image | None
    """``None``: a directory."""

    @property
    def key(self) -> str:
        """Return its name as a file's."""
        return self.digest.replace(":", "-")


class Roots:
    """Makes and finds roots on this machine."""

    def __init__(
        self,
        directory: Path,
        tell: Tell | None = None,
        *,
        forms: str = ROOT_FORMS,
        kind: str = "root",
    ) -> None:
        self.directory = directory
        self.kind = kind
        self._forms = forms
        self.bytes_max = BYTES_MAX
        self.after_making: Callable[[], object] = lambda: None
        """Called when a root was made and before anybody can remove it; in a thread."""
        self._tell = tell or (lambda _line: None)
        self._sources: dict[tuple[str, int, int, int], _Source] = {}
        self._held: dict[str, tuple[Root, int]] = {}
        self._making: dict[str, asyncio.Future[None]] = {}
        self._stop = threading.Event()

    def of(self, box_id: str) -> Root | None:
        """Return the root that a box is made of; ``None``: the host's files."""
        held = self._held.get(box_id)
        return held[0] if held else None

    async def hold(self, box_id: str, path: str) -> Root:
        """Return the root made from what lies at ``path``; it stays until ``release``.

        Raises:
            ConfigInvalid: nothing usable lies there.
            BoxFailed: it could not be made here (the disk is full); nothing of it is left.

        **Cancellation:** its making goes on, for whoever asks next.
        """
        source = await self._source(Path(path))
        while (found := self._found(source)) is None:
            making = self._making.get(source.key)
            if making is None:
                making = asyncio.ensure_future(asyncio.to_thread(self._make, source))
                self._making[source.key] = making
                making.add_done_callback(partial(self._made, source.key))
            await asyncio.shield(making)
        self.release(box_id)
        self._held[box_id] = found
        return found[0]

    def _made(self, key: str, making: "asyncio.Future[None]") -> None:
        self._making.pop(key, None)
        # Asked for in any case: whoever wanted it may have given up meanwhile.
        if making.cancelled() or making.exception() is not None:
            # It may have failed by what was changed there; who asks next looks at it again.
            self._sources = {at: one for at, one in self._sources.items() if one.key != key}

    def release(self, box_id: str) -> None:
        """Let go of a box's root; safe to repeat."""
        held = self._held.pop(box_id, None)
        if held is not None:
            os.close(held[1])

    async def close(self) -> None:
        """Stop what is being made and let go of everything."""
        self._stop.set()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for box_id in list(self._held):
            self.release(box_id)

    async def _source(self, path: Path) -> _Source:
        try:
            path, status = await asyncio.to_thread(_status, path)
            key = (str(path), status.st_ino, status.st_size, status.st_mtime_ns)
            if key not in self._sources:
                self._sources[key] = await asyncio.to_thread(_looked_at, path)
            return self._sources[key]
        except (OSError, Unusable, Unkept) as error:
            raise self._unusable(path, error) from error

    def _unusable(self, path: Path, error: Exception) -> ConfigInvalid:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return ConfigInvalid(
            f"no baseline can be made from {path}: {why}; nothing was made; name {self._forms}"
        )

    def _found(self, source: _Source) -> tuple[Root, int] | None:
        """Return a root that is there, and the lock that keeps it."""
        target = self.directory / source.key
        try:
            lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            about = target / ABOUT
            root = msgspec.json.decode(about.read_bytes(), type=Root)
            os.utime(about)  # used now: others go before it
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            return None
        return root, lock

    def _make(self, source: _Source) -> None:
        target = self.directory / source.key
        try:
            make_public(self.directory.parent)
            self.directory.mkdir(mode=0o711, exist_ok=True)
            with self._locked(target) as first:
                if not first:
                    return
                self._tell(f"unpacking {source.path} ({source.digest})")
                draft = target.with_suffix(DRAFT)
                remove_tree(draft)
                try:
                    _whole(source, draft, self)
                    draft.rename(target)
                finally:
                    remove_tree(draft)
                self.after_making()
                self._tell(f"unpacked {source.path}")
        except InterruptedError as error:
            raise BoxFailed(
                f"{source.path} was being unpacked when this worker ended; nothing of it is left"
            ) from error
        except (Unusable, Unkept) as error:
            raise self._unusable(source.path, error) from error
        except OSError as error:
            raise BoxFailed(
                f"{source.path} could not be unpacked in {self.directory} ({error.strerror}); "
                "nothing of it is left; free some space: stoker baselines prune"
            ) from error

    @contextlib.contextmanager
    def _locked(self, target: Path) -> Iterator[bool]:
        """Hold the lock on ``target``, or say that somebody else made it and is done with that."""
        lock = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not (_shared(lock) if (there := target.exists()) else _taken(lock)) or (
                there != target.exists()  # made or removed just before the lock was ours
            ):
                if self._stop.wait(_PAUSE_SECONDS):
                    raise InterruptedError
            yield not there
        finally:
            os.close(lock)

    def stopped(self) -> bool:
        """Whether this worker ends."""
        return self._stop.is_set()

    def tell(self, line: str) -> None:
        """Say how far a root is."""
        self._tell(line)


def _taken(lock: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _shared(lock: int) -> bool:
    """Take a lock that waits for who makes or removes a root, not for who uses it."""
    return _taken(lock, fcntl.LOCK_SH)


def _status(path: Path) -> tuple[Path, os.stat_result]:
    """Return what is there by this name, or by the one that an archive of it has."""
    if not path.is_absolute():
        raise Unusable("it is no absolute path")
    try:
        return path, path.stat()
    except FileNotFoundError:
        archive = path.with_name(path.name + ".tar")
        if archive.exists():
            return archive, archive.stat()
        raise


def _looked_at(path: Path) -> _Source:
    if saved_images.is_image(path):
        with saved_images.opened(path) as parts:
            image = saved_images.described(parts, platform.machine())
        return _Source(path, image.digest, image)
    return _Source(path, TREE + _packed(path, _Nowhere()), None)


class _Nowhere:
    """Takes what is only to be digested."""

    def write(self, content: bytes) -> int:
        """Let go of it."""
        return len(content)


def _packed(path: Path, into: object) -> str:
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        bounds = Bounds(bytes_max=BYTES_MAX, entries_max=_ENTRIES_MAX)
        return states.pack({b"root": opened}, into, bounds).digest  # type: ignore[arg-type]
    finally:
        os.close(opened)


def _whole(source: _Source, draft: Path, roots: Roots) -> None:
    """Make a root in ``draft``, on the disk when this returns."""
    draft.mkdir(mode=0o755)
    tree = draft / "tree"
    tree.mkdir()
    tree.chmod(0o755)
    bounds = Bounds(bytes_max=min(roots.bytes_max, BYTES_MAX), entries_max=_ENTRIES_MAX)
    if source.image is None:
        size = _copied(source, tree, bounds)
        root = Root(digest=source.digest, tree=str(tree), size_bytes=size)
    else:
        size = _unpacked(source, source.image, tree, bounds, roots)
        root = Root(
            digest=source.digest,
            tree=str(tree),
            environment=dict(source.image.environment),
            directory=_real_directory(tree, source.image.directory),
            size_bytes=size,
        )
    # It says where it will lie, not where it is made.
    root = msgspec.structs.replace(
        root,
        tree=str(draft.with_suffix("") / "tree"),
        kind=roots.kind,
        made_of=os.fsencode(source.path).decode(errors="replace"),
    )
    (draft / ABOUT).write_bytes(msgspec.json.encode(root))
    opened = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        kernel.sync_file_system(opened)
    finally:
        os.close(opened)
    reach(UNPACKED)


def _unpacked(source: _Source, image: Image, directory: Path, bounds: Bounds, roots: Roots) -> int:
    tree = Tree(directory, bounds, roots.stopped)
    try:
        with saved_images.opened(source.path) as parts:
            for number, layer in enumerate(image.layers, start=1):
                roots.tell(f"{source.path}: layer {number} of {len(image.layers)}")
                with tempfile.TemporaryFile(dir=directory.parent) as plain:
                    saved_images.unpacked_layer(
                        parts, layer, plain, bounds.bytes_max, roots.stopped
                    )
                    plain.flush()
                    tree.add(plain)
        return tree.written_bytes
    finally:
        tree.close()


def _copied(source: _Source, tree: Path, bounds: Bounds) -> int:
    """Copy a directory as a state is copied: no owner, device, socket or setuid bit comes along."""
    with tempfile.TemporaryFile(dir=tree.parent) as stream:
        digest = _packed(source.path, stream)
        if TREE + digest != source.digest:
            raise Unusable("it changed since it was first looked at; ask again")
        size = stream.tell()
        stream.seek(0)
        opened = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            unpack(stream, {b"root": opened}, None, digest, bounds, public=True)
        finally:
            os.close(opened)
        return size


def through_link(root: Root, target: str) -> bool:
    """Return whether a link of ``root`` lies on the way to ``target`` in its boxes, or is there."""
    parts = posixpath.normpath(target).strip("/").split("/")
    ways = (Path(root.tree, *parts[:depth]) for depth in range(1, len(parts) + 1))
    return parts[0] not in OWN and any(way.is_symlink() for way in ways)


def _real_directory(tree: Path, name: str) -> str:
    """Return an image's working directory without links; empty: it is the root, or not there."""
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = kernel.openat2(
            root,
            os.fsencode(name.lstrip("/")) or b".",
            os.O_PATH | os.O_DIRECTORY,
            resolve=kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS,
        )
    except OSError:
        return ""
    finally:
        os.close(root)
    try:
        path = os.readlink(f"/proc/self/fd/{found}")  # noqa: PTH115 - a path of the kernel's
    finally:
        os.close(found)
    inside = path.removeprefix(os.path.realpath(tree))
    taken = inside.split("/")[1:2] and inside.split("/")[1] in OWN and inside != WORKSPACE
    return "" if taken or not plain(inside) else inside


def plain(name: str) -> bool:
    """Return whether a name can be said in UTF-8; an image's others are not shown at its top."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
