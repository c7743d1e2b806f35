"""The host's side of a workspace never follows the box (CASES A13, A14, A17, A26)."""

import asyncio
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from stoker.errors import ToolRefused
from stoker.model.execution import Limits, Rung
from stoker.model.tools import ExportResult, ReadResult, RunRequest
from stoker.sandbox import beneath, kernel
from stoker.sandbox.files import WorkspaceFiles
from stoker.sandbox.removal import remove_tree
from support import sandbox
from support.sandbox import EVERY, HERE, ORDINARY_UID, OWN, attacked, boxed, needs_root


def test_a_walk_of_long_names_ends_at_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        (tmp_path / f"{number}{'n' * 200}").write_bytes(b"")
    monkeypatch.setattr(beneath, "NAMES_BYTES_MAX", 1000)
    files = WorkspaceFiles(str(tmp_path), None)
    try:
        exported = files.export((".",), bytes_max=1)
    finally:
        files.close()
    assert len(exported.files) == 4
    assert list(exported.refused.values()) == ["more than 1000 bytes of names"]


TRAPS = """
mkdir -p real/deep links
echo fine > real/deep/good.txt
ln -s /etc/passwd result.txt
ln -s /etc a
ln -s ../real links/up
ln -s real dir
ln -s /proc/self/root magic
mkfifo pipe
echo one > first; ln first second
truncate -s 4M sparse
"""
BAD_NAME = "python -c \"open(b'bad\\xff', 'w').write('x')\""


@pytest.mark.every_backend
@pytest.mark.parametrize("rung", HERE)
def test_a14_traps_are_refused_with_reasons_and_the_rest_is_exported(
    tmp_path: Path, rung: Rung
) -> None:
    async def body() -> tuple[ExportResult, list[ReadResult]]:
        async with boxed(tmp_path, rung) as (_, box):
            made = await box.run(
                RunRequest(argv=("sh", "-c", TRAPS + BAD_NAME)), timeout_seconds=30
            )
            assert made.result.ok, made.result.text
            exported = await box.export((".", "../outside", "/etc", "missing"), bytes_max=1 << 20)
            paths = ("result.txt", "a/passwd", "pipe", "second", "dir/deep/good.txt", "../x",
                     "magic/etc/passwd", "real")  # fmt: skip
            return exported, [await box.read_file(path, bytes_max=1 << 20) for path in paths]

    exported, reads = sandbox.run(body)
    assert exported.files == {"real/deep/good.txt": b"fine\n"}
    refused = exported.refused
    assert refused["result.txt"] == refused["a"] == refused["dir"] == "a symbolic link"
    assert refused["links/up"] == refused["magic"] == "a symbolic link"
    assert refused["pipe"] == "a pipe, not a file"
    assert "hard link" in refused["first"]
    assert "hard link" in refused["second"]
    assert "larger" in refused["sparse"]
    assert "not UTF-8" in refused["bad\\xff"]
    assert "leaves" in refused["../outside"]
    assert "absolute" in refused["/etc"]
    assert refused["missing"] == "not found"
    assert all(read.refused and not read.content for read in reads), reads


@pytest.mark.parametrize("rung", HERE)
def test_a26_writing_through_a_link_is_refused_and_the_host_unchanged(
    tmp_path: Path, rung: Rung
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "passwd").write_text("host")

    async def body() -> None:
        async with boxed(tmp_path / "state", rung) as (_, box):
            script = f"ln -s {outside} a; ln -s {outside}/passwd b; ln -s {outside}/new c; mkfifo p"
            await box.run(RunRequest(argv=("sh", "-c", script)), timeout_seconds=30)
            for path in (
                "a/x",
                "a/passwd",
                "b",
                "c",
                "p",
                "../up",
                "/abs",
                "p/x",
                "nul\0",
                "",
                ".",
            ):
                with pytest.raises(ToolRefused):
                    await box.write_files({path: b"taken over"})
            await box.write_files({"ok/deep/file": b"1", "ok/deep/file2": b"2"})
            await box.write_files({"ok/deep/file": b"rewritten"})
            check = "cat ok/deep/file && echo more >> ok/deep/file && mkdir ok/deep/own && id -u"
            run = await box.run(RunRequest(argv=("sh", "-c", check)), timeout_seconds=30)
            assert run.result.ok, run.result.text
            assert run.result.stdout.kept.startswith(b"rewritten")

    sandbox.run(body)
    assert [path.name for path in outside.iterdir()] == ["passwd"]
    assert (outside / "passwd").read_text() == "host"


def test_a26_following_works_without_the_resolve_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("host")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "link").symlink_to(tmp_path / "secret")
    files = WorkspaceFiles(str(workspace), None)
    assert files.read("link", bytes_max=100).refused == "a symbolic link stands in the path"
    files._strict = False
    assert files.read("link", bytes_max=100).refused == "a symbolic link stands in the path"
    if not kernel.has_openat2():
        pytest.skip("this kernel has no openat2; the stepwise way was tried")
    files._strict = True
    monkeypatch.setattr(kernel, "RESOLVE_STRICT", 0)
    assert files.read("link", bytes_max=100).content == b"host"
    files.close()


def test_a26_the_stepwise_way_refuses_the_same(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "a").symlink_to(tmp_path / "outside")
    files = WorkspaceFiles(str(workspace), None)
    files._strict = False
    files.write({"one/two/three": b"content"}, bytes_max=100)
    assert files.read("one/two/three", bytes_max=100).content == b"content"
    with pytest.raises(ToolRefused, match=r"symbolic link|no directory"):
        files.write({"a/x": b"taken over"}, bytes_max=100)
    exported = files.export((".",), bytes_max=100)
    assert exported.files == {"one/two/three": b"content"}
    assert exported.refused == {"a": "a symbolic link"}
    assert list((tmp_path / "outside").iterdir()) == []
    files.close()


def test_a14_sizes_are_bounded_by_bytes_copied(tmp_path: Path) -> None:
    files = WorkspaceFiles(str(tmp_path), None)
    (tmp_path / "file").write_bytes(b"x" * 1000)
    read = files.read("file", bytes_max=10)
    assert (read.content, read.total_bytes, read.refused) == (b"x" * 10, 1000, None)
    exported = files.export((".",), bytes_max=999)
    assert exported.files == {}
    assert "larger" in exported.refused["file"]
    with pytest.raises(ToolRefused, match="disk limit"):
        files.write({"file": b"x" * 101}, bytes_max=100)
    files.close()


@pytest.mark.parametrize("rung", OWN)
def test_a7_host_writes_meet_the_box_s_disk_limit(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with boxed(tmp_path, rung) as (_, box):
            third = box.policy.limits.disk_bytes // 2
            await box.write_files({"one": bytes(third)})
            with pytest.raises(ToolRefused, match="disk limit"):
                await box.write_files({"two": bytes(third + (1 << 20))})

    sandbox.run(body)


SETUID = "cp /usr/bin/id .; chmod 6755 id"


def _said(program: Path, *, uid: int = 0) -> bytes:
    return subprocess.run(
        [program], stdout=subprocess.PIPE, check=True, user=uid, group=uid, extra_groups=[]
    ).stdout


@needs_root
@pytest.mark.root
def test_a17_a_setuid_file_of_root_makes_anybody_root() -> None:
    # The defences off: the work runs as root, in a directory that honours the bit.
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        if os.statvfs(place).f_flag & os.ST_NOSUID:
            pytest.skip("the temporary directory is nosuid; set TMPDIR to one that is not")
        subprocess.run(["sh", "-c", SETUID], cwd=place, check=True)
        assert b"euid=0(root)" in _said(place / "id", uid=ORDINARY_UID)
        kernel.mount_tmpfs(str(place), "mode=0755")
        try:
            subprocess.run(["sh", "-c", SETUID], cwd=place, check=True)
            assert b"euid" not in _said(place / "id", uid=ORDINARY_UID)
        finally:
            kernel.unmount(str(place))


@pytest.mark.parametrize("rung", OWN)
def test_a17_a_setuid_file_is_harmless_on_the_host(tmp_path: Path, rung: Rung) -> None:
    async def body() -> None:
        async with boxed(tmp_path, rung) as (_, box):
            await box.run(RunRequest(argv=("sh", "-c", SETUID)), timeout_seconds=30)
            made = box.directory / "workspace" / "id"
            status = made.stat()
            assert stat.S_IMODE(status.st_mode) & stat.S_ISUID
            assert status.st_uid == status.st_gid == box.record.uid
            flags = os.statvfs(made.parent).f_flag
            assert flags & os.ST_NOSUID
            assert flags & os.ST_NODEV
            assert b"euid" not in await asyncio.to_thread(_said, made)
            with pytest.raises(PermissionError):
                await asyncio.to_thread(_said, made, uid=ORDINARY_UID)

    sandbox.run(body)


DEEP = """
import os
for _ in range(6000):
    os.mkdir("d"); os.chdir("d")
"""
ODD = """
import os
for name in (b"new\\nline", b"-rf", b"x" * 255, b"bad\\xff\\xfe", b" ", b"*"):
    open(name, "w").write("x")
    os.mkdir(name[:200] + b".d")
os.makedirs("shut/inner"); open("shut/inner/file", "w").write("x")
os.chmod("shut/inner/file", 0); os.chmod("shut/inner", 0); os.chmod("shut", 0)
"""


@pytest.mark.parametrize("rung", EVERY)
@pytest.mark.parametrize("script", [DEEP, ODD], ids=["deep", "odd names and modes"])
def test_a13_teardown_succeeds(tmp_path: Path, rung: Rung, script: str) -> None:
    if rung not in sandbox.OWN_UID:  # the full depth is removed from a real disk once, below
        script = script.replace("6000", "1200")
    limits = Limits(files_max=20_000)
    seen = attacked(tmp_path, rung, "python", "-c", script, limits=limits)
    assert seen.run.result.ok, seen.run.result.text
    assert seen.leaked == 0


def test_a13_the_library_s_remover_fails_on_such_a_tree(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(6000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises((RecursionError, OSError)):
        shutil.rmtree(top)
    assert remove_tree(top) > 0
    assert not top.exists()
