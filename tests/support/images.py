"""Saved container images, built from Debian's busybox and nothing that was downloaded."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

BUSYBOX = shutil.which("busybox", path="/usr/bin:/bin") or ""
NEEDS_BUSYBOX = "needs busybox: apt install busybox-static"
_APPLETS = (
    "cat",
    "echo",
    "env",
    "id",
    "ln",
    "ls",
    "mkdir",
    "pwd",
    "readlink",
    "sh",
    "stat",
    "touch",
)
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a layer."""

    name: str
    kind: bytes = tarfile.REGTYPE
    content: bytes = b""
    link: str = ""
    mode: int = 0o644


def directory(name: str, mode: int = 0o755) -> Entry:
    return Entry(name=name, kind=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> Entry:
    return Entry(name=name, kind=tarfile.SYMTYPE, link=target)


def same(name: str, target: str) -> Entry:
    return Entry(name=name, kind=tarfile.LNKTYPE, link=target)


def file(name: str, content: str | bytes = "", mode: int = 0o644) -> Entry:
    return Entry(
        name=name, content=content.encode() if isinstance(content, str) else content, mode=mode
    )


def base() -> tuple[Entry, ...]:
    """Return a layer with a shell: programs and the links by which they are called."""
    program = Path(BUSYBOX).read_bytes()
    return (
        directory("bin"),
        directory("etc"),
        directory("usr"),
        file("bin/busybox", program, mode=0o755),
        *(link(f"bin/{name}", "busybox") for name in _APPLETS),
        link("usr/bin", "/bin"),
    )


def tar(entries: Sequence[Entry]) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(entry.name)
            member.type, member.mode, member.linkname = entry.kind, entry.mode, entry.link
            member.size = len(entry.content)
            archive.addfile(member, io.BytesIO(entry.content))
    return into.getvalue()


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Built(msgspec.Struct, kw_only=True):
    """The parts of an image."""

    layers: list[bytes]
    config: bytes
    packed: bool

    def parts(self) -> dict[str, bytes]:
        """Return the files of an OCI layout."""
        blobs = {}

        def blob(content: bytes, kind: str, **more: Any) -> dict[str, Any]:
            blobs["blobs/sha256/" + digest(content)[7:]] = content
            return {"mediaType": kind, "digest": digest(content), "size": len(content), **more}

        stored = [gzip.compress(one, mtime=0) if self.packed else one for one in self.layers]
        manifest = {
            "schemaVersion": 2,
            "config": blob(self.config, "application/vnd.oci.image.config.v1+json"),
            "layers": [blob(one, "application/vnd.oci.image.layer.v1.tar") for one in stored],
        }
        kind = "application/vnd.oci.image.manifest.v1+json"
        index = {"schemaVersion": 2, "manifests": [blob(json.dumps(manifest).encode(), kind)]}
        return {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps(index).encode(),
            **blobs,
        }

    def older(self) -> dict[str, bytes]:
        """Return the files of an archive of docker's before version 25."""
        name = digest(self.config)[7:] + ".json"
        layers = {f"{number}/layer.tar": one for number, one in enumerate(self.layers)}
        saved = [{"Config": name, "RepoTags": None, "Layers": list(layers)}]
        return {"manifest.json": json.dumps(saved).encode(), name: self.config, **layers}


def image(
    *layers: Sequence[Entry],
    env: Sequence[str] = (),
    working_dir: str = "",
    packed: bool = False,
    architecture: str = "",
) -> Built:
    import platform  # noqa: PLC0415 - for this machine

    tars = [tar(one) for one in layers]
    config = {
        "architecture": architecture or MACHINE[platform.machine()],
        "os": "linux",
        "config": {"Env": list(env), "WorkingDir": working_dir, "Entrypoint": ["/never"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(one) for one in tars]},
    }
    return Built(layers=tars, config=json.dumps(config).encode(), packed=packed)


def as_tar(parts: Mapping[str, bytes], path: Path) -> Path:
    path.write_bytes(tar([Entry(name=name, content=content) for name, content in parts.items()]))
    return path


def as_directory(parts: Mapping[str, bytes], path: Path) -> Path:
    for name, content in parts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path
