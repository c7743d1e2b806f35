"""Saved images that are forged: nothing outside is read, no reader is led astray or overfed."""

import asyncio
import io
import itertools
import os
import platform
import tarfile
from pathlib import Path

import msgspec
import pytest

from stoker.sandbox.roots import Roots
from stoker.sandbox.runtime import RuntimeFiles
from stoker.sandbox.saved_images import Unusable, described, members, opened
from stoker.sandbox.views import root_view
from support.images import as_tar, directory, file, image, link

MACHINE = platform.machine()


def header(kind: bytes, size: bytes = b"00000000000\0", *, more: bool = False) -> bytes:
    """Return the header of an entry; ``more``: blocks with its holes follow."""
    info = tarfile.TarInfo("entry")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size
    block[482] = more
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


HOLES = b"00000000001\0" * 42 + b"\1"
SPARSE = header(tarfile.GNUTYPE_SPARSE, more=True)
FORGED = {
    "holes without end": SPARSE + HOLES.ljust(512, b"\0") * 4096,
    "holes cut short": SPARSE + HOLES,
    "before itself": header(tarfile.REGTYPE, b"\xff" * 10 + b"\xfe\0"),
    "beyond any file": header(tarfile.REGTYPE, b"\x80" + b"\x7f" * 11) + b"\0" * 1024,
}


@pytest.mark.parametrize("which", FORGED)
def test_a_forged_archive_is_refused(which: str) -> None:
    with pytest.raises(Unusable):  # never the same entry again and again
        list(itertools.islice(members(io.BytesIO(FORGED[which])), 10))


def test_headers_for_all_entries_are_not_gathered() -> None:
    into = io.BytesIO()
    for number in range(50):
        with tarfile.open(
            fileobj=into, mode="w", pax_headers={f"key{number}": "x" * 10_000}
        ) as tar:
            tar.addfile(tarfile.TarInfo(f"entry{number}"))
            into.seek(tar.offset)
    assert all(not member.pax_headers for member in members(into))


def layout(folder: Path, config: str) -> Path:
    """Write a layout that has the index of an older image only."""
    folder.mkdir()
    (folder / "oci-layout").write_text("{}")
    (folder / "manifest.json").write_bytes(
        msgspec.json.encode([{"Config": config, "Layers": ["layer.tar"]}])
    )
    return folder


@pytest.mark.parametrize("name", ["../outside.json", "{absolute}", "link.json", "way/outside.json"])
def test_an_older_image_in_a_directory_names_nothing_outside(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside.json"
    outside.write_bytes(image((file("a", "a"),)).config)
    saved = layout(tmp_path / "saved", name.format(absolute=outside))
    (saved / "link.json").symlink_to(outside)
    (saved / "way").symlink_to(tmp_path)
    with opened(saved) as parts, pytest.raises(Unusable):
        described(parts, MACHINE)
    (saved / "manifest.json").write_text('[{"Config": "inside.json", "Layers": ["layer.tar"]}]')
    (saved / "inside.json").write_bytes(outside.read_bytes())
    with opened(saved) as parts:
        assert described(parts, MACHINE).layers[0].part == "layer.tar"


def test_a_pipe_is_waited_for_nowhere(tmp_path: Path) -> None:
    saved = layout(tmp_path / "saved", "pipe")
    os.mkfifo(saved / "pipe")
    with opened(saved) as parts, pytest.raises(Unusable, match="missing"):
        described(parts, MACHINE)
    os.mkfifo(tmp_path / "image.tar")
    with pytest.raises(Unusable, match="neither"), opened(tmp_path / "image.tar"):
        pass


def test_names_that_are_no_text_cannot_be_shown_and_harm_no_box(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff")
    built = image((directory(odd), link("app", odd), link(f"{odd}l", "a")), working_dir="/app")
    saved = as_tar(built.parts(), tmp_path / "image.tar")

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        root = await roots.hold("box", str(saved))
        assert root.directory == ""
        files = RuntimeFiles(
            launcher=None,
            launcher_missing="",
            python=tmp_path,
            scripts=tmp_path,
            egress=tmp_path,
            etc=tmp_path,
            key="",
            baselines=tmp_path,
            roots=tmp_path,
        )
        view = root_view(files, root)
        assert view.links == []
        assert len(view.binds) == 1, "our scripts"
        await roots.close()

    asyncio.run(body())
