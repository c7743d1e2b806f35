"""The artifact store: what it promises about content, damage and half-written files."""

from pathlib import Path

import pytest

from stoker.errors import ArtifactDamaged, ArtifactNotStored
from stoker.journal.artifacts import ArtifactStore
from stoker.journal.memory import MemoryArtifacts
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest

LARGE = b"0123456789abcdef" * (INLINE_BYTES_MAX // 8)


def test_small_content_stays_inline_and_touches_no_disk(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    value = store.put(b"x" * INLINE_BYTES_MAX)
    assert value.inline == b"x" * INLINE_BYTES_MAX
    assert store.get(value) == value.inline
    assert not (tmp_path / "artifacts").exists()


def test_large_content_is_stored_once_under_its_digest(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    value = store.put(LARGE)
    assert value == Value(digest=content_digest(LARGE), size_bytes=len(LARGE))
    assert store.put(LARGE) == value
    assert store.get(value) == LARGE
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / value.digest[:2] / value.digest[2:]
    ]


def test_b15_twenty_megabytes_travel_by_address(tmp_path: Path) -> None:
    content = bytes(20 * 1024 * 1024)
    value = ArtifactStore(tmp_path).put(content)
    assert value.inline is None
    assert ArtifactStore(tmp_path).get(value) == content


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damage_is_named_and_never_returned(tmp_path: Path, damage: str) -> None:
    store = ArtifactStore(tmp_path)
    value = store.put(LARGE)
    path = tmp_path / value.digest[:2] / value.digest[2:]
    if damage == "flipped":
        path.write_bytes(b"!" + LARGE[1:])
    elif damage == "cut":
        path.write_bytes(LARGE[:-1])
    else:
        path.unlink()
    with pytest.raises(ArtifactDamaged, match=value.digest):
        store.get(value)


def test_a_file_cut_short_is_written_again(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    value = store.put(LARGE)
    (tmp_path / value.digest[:2] / value.digest[2:]).write_bytes(b"half")
    assert store.get(store.put(LARGE)) == LARGE


def test_a_digest_that_is_a_path_reads_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    store = ArtifactStore(tmp_path / "artifacts")
    with pytest.raises(ArtifactDamaged, match="no content address"):
        store.get(Value(digest="../secret", size_bytes=1))


def test_inline_content_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(ArtifactDamaged):
        ArtifactStore(tmp_path).get(Value(digest="0" * 64, size_bytes=3, inline=b"abc"))


def test_a_failed_write_leaves_nothing_under_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stoker.journal.artifacts.os.fsync", no_space)
    (tmp_path / content_digest(LARGE)[:2]).mkdir()
    with pytest.raises(ArtifactNotStored, match=r"No space.*nothing of them was kept; free some"):
        ArtifactStore(tmp_path).put(LARGE)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_store_in_memory_keeps_values_checks_them_and_holds_no_files(tmp_path: Path) -> None:
    store = MemoryArtifacts()
    value = store.put(LARGE)
    assert (value.inline, store.get(value)) == (None, LARGE)
    assert store.put(b"small").inline == b"small"
    with pytest.raises(ArtifactDamaged, match="lives as long as its process"):
        MemoryArtifacts().get(value)
    with pytest.raises(ArtifactDamaged, match="do not match"):
        store.get(Value(digest=value.digest, size_bytes=1))
    with pytest.raises(ArtifactNotStored, match="holds no files"):
        store.adopt(tmp_path / "state", value.digest)
