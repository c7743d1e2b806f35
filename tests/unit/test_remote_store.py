"""Checkpoints in an S3 store: whole or absent, digested, retried, and had again without a disk."""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import ArtifactDamaged, ArtifactNotStored, BoxFailed, StokerError
from stoker.journal.artifacts import ArtifactStore
from stoker.model.execution import Baseline, ExecutionPolicy, Isolation, Trust
from stoker.model.value import content_digest
from stoker.testing.boxes import MemoryBackend
from stoker.worker import remote
from stoker.worker.remote import RemoteStore
from stoker.worker.states import States
from support import needs

if not (importlib.util.find_spec("moto") and importlib.util.find_spec("obstore")):
    pytest.skip(needs.S3, allow_module_level=True)

SECRET = "key-that-no-message-shows"
TRUSTED = ExecutionPolicy(isolation=Isolation.PROCESS, trust=Trust.TRUSTED)
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
    made = urllib.request.Request(f"{url}/states", method="PUT")
    made.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4")
    with urllib.request.urlopen(made, timeout=30) as answer:
        assert answer.status == 200
    yield url
    server.communicate("")


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return RemoteStore("s3://states/run", endpoint=endpoint)


def written(folder: Path, content: bytes) -> tuple[Path, str]:
    file = folder / "file"
    file.write_bytes(content)
    return file, content_digest(content)


def test_a_lost_environment_begins_again_on_a_worker_that_shares_only_the_store(
    tmp_path: Path, store: RemoteStore
) -> None:
    def worker(name: str) -> States:
        (tmp_path / name).mkdir()
        return States(ArtifactStore(tmp_path / name / "kept"), tmp_path / name / "drafts", store)

    async def body() -> None:
        one, two = worker("one"), worker("two")
        box = await MemoryBackend().create("box_a", Baseline(), TRUSTED)
        await box.write_files({"work": b"done" * 10_000})
        saved = await one.keep(box)
        assert saved.file == ""
        found = await two.found(saved)
        assert found.file.startswith(str(tmp_path / "two"))
        again = await MemoryBackend().restore("box_b", Baseline(), TRUSTED, found)
        assert (await again.read_file("work", bytes_max=1 << 20)).content == b"done" * 10_000
        assert list((tmp_path / "two" / "drafts").iterdir()) == []

    asyncio.run(body())


def test_content_of_many_parts_comes_back_and_is_put_once(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, digest = written(tmp_path, os.urandom(1 << 20) * 12)
    store.put(file, digest)
    assert store.fetch(digest, tmp_path).read_bytes() == file.read_bytes()

    def never(*_: object) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(store._obstore, "put", never)
    store.put(file, digest)


def test_no_request_fetches_more_than_a_slow_line_bears(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PIECE_BYTES", 1000)
    monkeypatch.delattr(store._obstore, "get")
    asked: list[int] = []
    ranged = store._obstore.get_range

    def get_range(*of: object, start: int, end: int) -> object:
        asked.append(end - start)
        return ranged(*of, start=start, end=end)

    monkeypatch.setattr(store._obstore, "get_range", get_range)
    for content, pieces in ((b"", []), (b"x" * 1000, [1000]), (b"y" * 2001, [1000, 1000, 1])):
        asked.clear()
        file, digest = written(tmp_path, content)
        store.put(file, digest)
        assert store.fetch(digest, tmp_path).read_bytes() == content
        assert asked == pieces


def test_what_is_missing_or_something_else_is_not_used(tmp_path: Path, store: RemoteStore) -> None:
    file, digest = written(tmp_path, b"right")
    with pytest.raises(ArtifactDamaged, match="neither here nor in"):
        store.fetch(digest, tmp_path)
    store._obstore.put(store._store, digest, b"wrong")
    with pytest.raises(ArtifactDamaged, match="holds something else"):
        store.fetch(digest, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_equal_states_come_and_go_at_once(tmp_path: Path) -> None:
    both = threading.Barrier(2, timeout=30)

    class Meeting:
        """A remote store in which each call waits for another one."""

        def put(self, file: Path, _digest: str) -> None:
            both.wait()
            assert file.exists()

        def fetch(self, digest: str, drafts: Path) -> Path:
            (drafts / digest).write_bytes(b"state")
            both.wait()
            return drafts / digest

    async def body() -> None:
        kept = ArtifactStore(tmp_path / "kept")
        states = States(kept, tmp_path / "drafts", Meeting())
        backend = MemoryBackend()
        one = await backend.create("box_a", Baseline(), TRUSTED)
        two = await backend.create("box_b", Baseline(), TRUSTED)
        saved, same = await asyncio.gather(states.keep(one), states.keep(two))
        assert saved.digest == same.digest
        lost = kept.path(saved.digest)
        lost.unlink()
        found, again = await asyncio.gather(states.found(saved), states.found(saved))
        assert found.file == again.file == str(lost)
        assert lost.read_bytes() == b"state"
        assert list((tmp_path / "drafts").iterdir()) == []

    asyncio.run(body())


FETCHER = """
import os, sys
from pathlib import Path
from stoker.seams import faultpoints
from stoker.worker.remote import RemoteStore

faultpoints.arm(os.environ)
RemoteStore("s3://states/run", endpoint=sys.argv[1]).fetch(sys.argv[2], Path(sys.argv[3]))
print("not killed")
"""


def test_what_a_killed_worker_fetched_has_no_name_and_goes_with_the_next(
    tmp_path: Path, store: RemoteStore, endpoint: str
) -> None:
    file, digest = written(tmp_path, b"whole")
    store.put(file, digest)
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FETCHER, endpoint, digest, str(drafts)],
        env={**os.environ, "STOKER_FAULT": f"{remote.FETCHED}=kill"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert [path.name.startswith(".") for path in drafts.iterdir()] == [True]
    States(ArtifactStore(tmp_path / "kept"), drafts, store)
    assert list(drafts.iterdir()) == []


def test_a_store_out_of_reach_is_our_fault_within_bounds_and_tells_no_secret(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_RETRIES_MAX", 1)
    gone = RemoteStore("s3://states/run", endpoint="http://127.0.0.1:1")
    file, digest = written(tmp_path, b"x")
    began = time.monotonic()
    told: list[StokerError] = []
    with pytest.raises(ArtifactNotStored, match="does not count") as put:
        gone.put(file, digest)
    told.append(put.value)
    with pytest.raises(BoxFailed, match="could not be fetched") as fetched:
        gone.fetch(digest, tmp_path)
    told.append(fetched.value)
    assert time.monotonic() - began < 50
    assert all(SECRET not in one.message for one in told)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
