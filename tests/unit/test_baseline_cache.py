"""What baselines keep on a machine is bounded, and none in use goes."""

import asyncio
import contextlib
import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.sandbox import baseline_cache, runtime
from stoker.sandbox.baseline_cache import Kept, kept, prune
from stoker.sandbox.baselines import Baselines
from stoker.sandbox.roots import Roots
from support.images import as_tar, digest, file, image


def made(folder: Path, name: str, size: int = 1000) -> Path:
    return as_tar(image((file(name, b"x" * size),)).parts(), folder / f"{name}.tar")


def key(name: str, size: int = 1000) -> str:
    return digest(image((file(name, b"x" * size),)).config).replace(":", "-")


def used(roots: Path, name: str, at: float) -> None:
    os.utime(roots / key(name) / "about.json", (at, at))


def test_the_least_recently_used_go_first_and_none_that_a_box_is_made_of(tmp_path: Path) -> None:
    states, where = tmp_path / "states", tmp_path / "roots"
    states.mkdir()
    (states / "recipe-a").write_text("content")
    (states / "recipe-b").write_text("content")
    (states / "content").write_bytes(b"s" * 500)
    os.utime(states / "recipe-a", (50, 50))
    os.utime(states / "recipe-b", (400, 400))

    async def body() -> None:
        first, second = Roots(where), Roots(where)
        for number, name in enumerate("abc"):
            await first.hold("box", str(made(tmp_path, name)))
            used(where, name, 100.0 * (number + 1))
        first.release("box")
        await second.hold("box_living", str(tmp_path / "a.tar"))
        used(where, "a", 100.0)
        names = [one.name for one in kept(states=states, roots=where)]
        assert names == ["recipe-a", key("a"), key("b"), key("c"), "recipe-b"]
        gone = prune(2600, states=states, roots=where)
        assert [one.name for one in gone] == ["recipe-a", key("b")]
        assert (states / "content").exists(), "another recipe made the same"
        assert [one.in_use for one in kept(states=states, roots=where)] == [True, False, False]
        prune(1, states=states, roots=where)
        assert [one.name for one in kept(states=states, roots=where)] == [key("a")]
        assert not (states / "content").exists()
        second.release("box_living")
        prune(1, states=states, roots=where)
        assert kept(states=states, roots=where) == []
        for roots in (first, second):
            await roots.close()

    asyncio.run(body())


def test_a_removal_that_was_killed_is_ended_by_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        root = await roots.hold("box", str(made(tmp_path, "a")))
        await roots.close()
        Path(root.tree).parent.rename(tmp_path / "roots" / f"{key('a')}.gone")
        assert kept(states=tmp_path, roots=tmp_path / "roots") == []
        prune(1 << 30, states=tmp_path, roots=tmp_path / "roots")
        assert [path.suffix for path in (tmp_path / "roots").iterdir()] == [".lock"]

    asyncio.run(body())


def test_what_a_killed_maker_left_goes_and_what_is_being_made_stays(tmp_path: Path) -> None:
    drafts = [tmp_path / name for name in ("sha256-a.part", "recipe-a.part", "sha256-b.gone")]
    for draft in drafts:
        (draft / "half").mkdir(parents=True)
    with contextlib.ExitStack() as makers:
        for draft in drafts:
            lock = makers.enter_context(draft.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        prune(1, states=tmp_path, roots=tmp_path)
        assert all(draft.exists() for draft in drafts)
    prune(1 << 30, states=tmp_path, roots=tmp_path)
    assert not any(draft.exists() for draft in drafts)


def test_two_may_make_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"recipe-{name}").write_text("content")
    (tmp_path / "content").write_bytes(b"s" * 500)

    def listed_before_another_removed(*, states: Path, roots: Path) -> list[Kept]:
        found = kept(states=states, roots=roots)
        monkeypatch.setattr(baseline_cache, "kept", kept)
        assert len(prune(1, states=states, roots=roots)) == 3
        return found

    async def body() -> None:
        roots = Roots(tmp_path / "roots")
        await roots.hold("box", str(made(tmp_path, "a")))
        await roots.close()

    asyncio.run(body())
    monkeypatch.setattr(baseline_cache, "kept", listed_before_another_removed)
    prune(1, states=tmp_path, roots=tmp_path / "roots")
    assert kept(states=tmp_path, roots=tmp_path / "roots") == []
    assert not (tmp_path / "content").exists()


def test_who_finds_a_root_whose_maker_still_makes_room_waits_for_it(tmp_path: Path) -> None:
    saved = str(made(tmp_path, "a"))
    whole, waited = threading.Event(), threading.Event()

    class Waiting(threading.Event):
        """Tells that somebody waits."""

        def wait(self, timeout: float | None = None) -> bool:
            waited.set()
            return super().wait(timeout)

    def room() -> None:
        whole.set()
        waited.wait(30)

    async def body() -> None:
        maker, finder = Roots(tmp_path / "roots"), Roots(tmp_path / "roots")
        maker.after_making = room
        finder._stop = Waiting()
        making = asyncio.create_task(maker.hold("box", saved))
        assert await asyncio.to_thread(whole.wait, 30)
        asked = await finder.hold("box", saved)
        assert waited.is_set()
        assert asked == await making
        for roots in (maker, finder):
            await roots.close()

    asyncio.run(body())


def test_making_keeps_to_the_bound_and_what_was_just_made_stays(tmp_path: Path) -> None:
    async def body() -> None:
        states = tmp_path / "states"
        states.mkdir()
        baselines = Baselines(states, tmp_path / "roots")
        baselines.bytes_max = 1500
        for name in "abc":
            root = await baselines.roots.hold("box", str(made(tmp_path, name)))
            assert (Path(root.tree) / name).exists()
            baselines.roots.release("box")
        assert [one.name for one in kept(states=states, roots=tmp_path / "roots")] == [key("c")]
        baselines.bytes_max = 1
        root = await baselines.roots.hold("box", str(made(tmp_path, "d")))
        assert os.access(root.tree, os.R_OK), "a box could never begin, were it removed at once"
        await baselines.roots.close()

    asyncio.run(body())


def test_the_command_prepares_shows_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "default_directory", lambda: tmp_path / "runtime")
    saved = made(tmp_path, "a")
    run = CliRunner()
    done = run.invoke(app, ["baselines", "prepare", str(saved)])
    assert done.exit_code == 0, done.output
    assert digest(image((file("a", b"x" * 1000),)).config) in done.output
    shown = run.invoke(app, ["baselines", "list", "--json"])
    (one,) = json.loads(shown.stdout)
    assert (one["kind"], one["name"], one["size_bytes"]) == ("root", key("a"), 1000)
    assert one["made_of"] == str(saved)
    monkeypatch.setenv("COLUMNS", "300")
    assert str(saved) in run.invoke(app, ["baselines", "list"]).stdout
    assert run.invoke(app, ["baselines", "prune", "--to", "much"]).exit_code == 2
    gone = run.invoke(app, ["baselines", "prune", "--json"])
    assert [line["name"] for line in json.loads(gone.stdout)] == [key("a")]
    assert "none" in run.invoke(app, ["baselines", "list"]).stdout
