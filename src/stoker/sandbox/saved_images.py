"""Saved container images: what one is made of, each part checked against its digest.

Three forms are read: an OCI layout (a directory, or a tar of one, as ``docker save`` writes since
version 25) and the archive of older ``docker save``. Nothing is fetched. Nothing in an image is
believed: digests are compared, sizes bounded, and names lead nowhere but into the image.

An image is named by the digest of its configuration, which holds the digest of each layer as it is
unpacked. So the same image has the same name in every form, compressed or not.
"""

import contextlib
import gzip
import hashlib
import os
import posixpath
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol, Self, TypeVar, cast

import msgspec

from stoker.sandbox import kernel

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DOCUMENT_BYTES_MAX = 4 * 1024 * 1024
_HEADER_BYTES_MAX = 1024 * 1024
"""Of one entry of an archive, all its headers: long names, attributes, holes."""
_PARTS_MAX = 4096
"""Files in one archive of an image, and descriptors in one index."""
_LAYERS_MAX = 256
_DEPTH_MAX = 4
"""Indexes within indexes."""
_CHUNK_BYTES = 1024 * 1024
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

T = TypeVar("T")


class Unusable(Exception):
    """An image that is none, is damaged, or cannot be used here; with the reason."""


class _Platform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None


class _Index(msgspec.Struct, frozen=True):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor
    layers: list[_Descriptor]


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    """One image of an older archive."""

    config: str
    layers: list[str]


class _Execution(msgspec.Struct, frozen=True, rename="pascal"):
    env: list[str] | None = None
    working_dir: str = ""


class _RootFiles(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    rootfs: _RootFiles
    architecture: str = ""
    os: str = "linux"
    config: _Execution | None = None


class Layer(NamedTuple):
    """One layer, unread."""

    part: str
    """Its name in the image."""
    digest: str
    """As it is stored; empty where only the unpacked form has one."""
    diff_id: str
    """As it is unpacked."""


class Image(NamedTuple):
    """One saved image."""

    digest: str
    """Of its configuration."""
    environment: Mapping[str, str]
    directory: str
    """Its working directory; empty: it names none."""
    layers: tuple[Layer, ...]


class Parts(Protocol):
    """The files an image is made of."""

    def open(self, name: str) -> IO[bytes]:
        """Open one; ``KeyError``: there is none."""
        ...


def is_image(path: Path) -> bool:
    """Return whether ``path`` is an archive or a layout, not an unpacked root file system."""
    return not path.is_dir() or (path / "oci-layout").exists()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Parts]:
    """Open an image.

    Raises:
        Unusable: it is none.
        OSError: it cannot be read.
    """
    if path.is_dir():
        yield _Directory(path)
        return
    if not path.is_file():  # to open a pipe would wait for whoever writes to it
        raise Unusable("it is neither a file nor a directory")
    with path.open("rb") as file:
        if file.read(len(_GZIP)) == _GZIP:
            raise Unusable("the archive is compressed as a whole; save it without, or gunzip it")
        yield _Archive(file)


class _Directory:
    """A layout in a directory: nothing outside it is read, and no link in it is followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        """Open one file; an older image names its layers itself."""
        root = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            found = kernel.openat2(root, os.fsencode(name), flags, resolve=kernel.RESOLVE_STRICT)
        except FileNotFoundError as error:
            raise KeyError(name) from error
        except OSError as error:
            raise Unusable(f"{name[:80]!r} is no file in it ({error.strerror})") from error
        finally:
            os.close(root)
        file = os.fdopen(found, "rb")
        if not stat.S_ISREG(os.fstat(found).st_mode):
            file.close()
            raise KeyError(name)
        return file


class _Archive:
    """A tar of one."""

    def __init__(self, file: BinaryIO) -> None:
        self._members: dict[str, tarfile.TarInfo] = {}
        for member in members(file):
            if len(self._members) >= _PARTS_MAX:
                raise Unusable(f"it holds more than {_PARTS_MAX} files")
            self._members[posixpath.normpath(member.name)] = member
        self._file = file

    def open(self, name: str) -> IO[bytes]:
        """Open one file; an older archive names a layer twice by a link."""
        name = posixpath.normpath(name)
        member = self._members[name]
        if member.issym():
            linked = posixpath.join(posixpath.dirname(name), member.linkname)
            member = self._members[posixpath.normpath(linked)]
        elif member.islnk():
            member = self._members[posixpath.normpath(member.linkname)]
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise KeyError(name)
        return cast("IO[bytes]", _Section(self._file, member.offset_data, member.size))


class _Section:
    """A part of an open file, read forward."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._descriptor = file.fileno()
        self._at, self._end = start, start + length

    def read(self, length: int = -1) -> bytes:
        """Return the next bytes."""
        left = self._end - self._at
        piece = os.pread(self._descriptor, left if length < 0 else min(length, left), self._at)
        self._at += len(piece)
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the file open: it is the archive's."""


class _Bounded:
    """Gives an archive's reader what it asks for, unless the headers of an entry are huge."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek
        self.left = _HEADER_BYTES_MAX
        """What the headers of this entry may still take."""

    def read(self, length: int) -> bytes:
        """Return the next bytes."""
        if not 0 <= length <= self.left:
            raise Unusable("the header of an entry is too long")
        self.left -= length
        return self._file.read(length)


_UNREADABLE = (
    tarfile.TarError, ValueError, EOFError, RecursionError, LookupError, OverflowError
)  # fmt: skip
"""What the reader raises for archives that are cut short or forged."""


def members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield what a tar holds; contents are read by offset.

    Raises:
        Unusable: it is no tar, or ends early.
    """
    file.seek(0)
    source = _Bounded(file)
    try:
        archive = tarfile.TarFile(fileobj=cast("Any", source), errorlevel=2)
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep them all
            archive.pax_headers = {}  # those for all entries that follow: no image needs them
            member.pax_headers = {}
            if member.size < 0:
                raise Unusable("an entry is less than empty")  # it would be read again and again
            source.left = _HEADER_BYTES_MAX
            yield member
    except _UNREADABLE as error:
        raise Unusable(f"an archive in it cannot be read ({error})") from error


# --- what it is made of ---------------------------------------------------------------------------


def described(parts: Parts, machine: str) -> Image:
    """Return the image for ``machine`` (as uname has it).

    Raises:
        Unusable: there is none, or more than one.
    """
    try:
        index = _document(parts, "index.json", _Index)
    except KeyError:
        return _older(parts, machine)
    manifest = _chosen(parts, index, _MACHINES.get(machine, machine), _DEPTH_MAX)
    content = _blob(parts, manifest.config)
    config = _config(content, machine, len(manifest.layers))
    layers = tuple(
        Layer(_path(one.digest), _checked(one.digest), _checked(diff))
        for one, diff in zip(manifest.layers, config.rootfs.diff_ids, strict=True)
    )
    return _image(manifest.config.digest, config, layers)


def _chosen(parts: Parts, index: _Index, architecture: str, depth: int) -> _Manifest:
    if len(index.manifests) > _PARTS_MAX:
        raise Unusable("its index is too long")
    fitting = [
        one
        for one in index.manifests
        if one.platform is None or one.platform == _Platform("linux", architecture)
    ]
    if len({one.digest for one in fitting}) != 1:
        raise Unusable(
            f"it holds {len(fitting)} images for linux/{architecture}; save the one that is meant"
        )
    content = _blob(parts, fitting[0])
    if b'"manifests"' in content and b'"layers"' not in content:
        if not depth:
            raise Unusable("its indexes are nested too deep")
        return _chosen(parts, _decoded(content, _Index, "an index"), architecture, depth - 1)
    return _decoded(content, _Manifest, "a manifest")


def _older(parts: Parts, machine: str) -> Image:
    try:
        saved = _document(parts, "manifest.json", list[_Saved])
    except KeyError as error:
        raise Unusable(
            "it is no saved image: it has neither index.json nor manifest.json"
        ) from error
    if len(saved) != 1:
        raise Unusable(f"it holds {len(saved)} images; save the one that is meant")
    content = _read(parts, saved[0].config)
    config = _config(content, machine, len(saved[0].layers))
    layers = tuple(
        Layer(name, "", _checked(diff))
        for name, diff in zip(saved[0].layers, config.rootfs.diff_ids, strict=True)
    )
    return _image(f"sha256:{hashlib.sha256(content).hexdigest()}", config, layers)


def _config(content: bytes, machine: str, layers: int) -> _Config:
    config = _decoded(content, _Config, "its configuration")
    here = _MACHINES.get(machine, machine)
    if config.os != "linux" or config.architecture not in ("", here):
        raise Unusable(
            f"it is for {config.os}/{config.architecture}, and this host is linux/{here}"
        )
    if len(config.rootfs.diff_ids) != layers or layers > _LAYERS_MAX:
        raise Unusable(f"it has {layers} layers and {len(config.rootfs.diff_ids)} digests of them")
    return config


def _image(digest: str, config: _Config, layers: tuple[Layer, ...]) -> Image:
    execution = config.config or _Execution()
    words = [word.partition("=") for word in execution.env or []]
    return Image(
        digest=_checked(digest),
        environment={name: value for name, _, value in words if name and "\0" not in name + value},
        directory=posixpath.normpath(execution.working_dir) if execution.working_dir else "",
        layers=layers,
    )


def _checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise Unusable(f"{digest[:80]!r} is no sha256 digest")
    return digest


def _path(digest: str) -> str:
    return "blobs/sha256/" + _checked(digest).partition(":")[2]


def _blob(parts: Parts, descriptor: _Descriptor) -> bytes:
    content = _read(parts, _path(descriptor.digest))
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != descriptor.digest:
        raise Unusable(f"it is damaged: {descriptor.digest} holds something else")
    return content


def _document(parts: Parts, name: str, kind: type[T]) -> T:
    with parts.open(name) as file:
        content = file.read(_DOCUMENT_BYTES_MAX + 1)
    return _decoded(content, kind, name)


def _read(parts: Parts, name: str) -> bytes:
    try:
        with parts.open(name) as file:
            content = file.read(_DOCUMENT_BYTES_MAX + 1)
    except KeyError as error:
        raise Unusable(f"it is damaged: {name} is missing") from error
    if len(content) > _DOCUMENT_BYTES_MAX:
        raise Unusable(f"{name} is too long")
    return content


def _decoded(content: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unusable(f"{what} cannot be read ({error})") from error


# --- layers ---------------------------------------------------------------------------------------


def unpacked_layer(
    parts: Parts, layer: Layer, into: BinaryIO, bytes_max: int, stopped: Callable[[], bool]
) -> int:
    """Write the tar of ``layer`` to ``into``, both its digests compared; return its length.

    Raises:
        Unusable: it is missing, damaged, packed in a way that is not known, or over ``bytes_max``.
        InterruptedError: ``stopped``.
    """
    try:
        with parts.open(layer.part) as file:
            stored = _Digested(file)
            plain = hashlib.sha256()
            size = 0
            for piece in _plain(stored):
                size += len(piece)
                if size > bytes_max:
                    raise Unusable(f"its layers unpack to more than {bytes_max} bytes")
                if stopped():
                    raise InterruptedError
                plain.update(piece)
                into.write(piece)
            while stored.read(_CHUNK_BYTES):  # what follows the compressed stream counts as well
                pass
    except KeyError as error:
        raise Unusable(f"it is damaged: {layer.part} is missing") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unusable(f"it is damaged: {layer.part} ends early or is no gzip ({error})") from error
    unpacked = f"sha256:{plain.hexdigest()}"
    if unpacked != layer.diff_id or layer.digest not in ("", stored.digest()):
        raise Unusable(f"it is damaged: {layer.part} does not match its digest")
    return size


class _Digested:
    """Digests what is read through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._first = file.read(4)

    def begins(self, mark: bytes) -> bool:
        """Return whether what was not read yet begins so."""
        return self._first.startswith(mark)

    def read(self, length: int) -> bytes:
        """Return the next bytes."""
        piece, self._first = self._first[:length], self._first[length:]
        piece = piece or self._file.read(length)
        self._hash.update(piece)
        return piece

    def digest(self) -> str:
        """Return the digest of what was read."""
        return f"sha256:{self._hash.hexdigest()}"


def _plain(stored: _Digested) -> Iterator[bytes]:
    if stored.begins(_ZSTD):
        raise Unusable("a layer is packed with zstd, which is not read here; save it with gzip")
    reader: Any = gzip.GzipFile(fileobj=cast("Any", stored)) if stored.begins(_GZIP) else stored
    while piece := reader.read(_CHUNK_BYTES):
        yield piece
