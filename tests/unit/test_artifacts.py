"""Artifacts: B15 and what a damaged or full disk does."""

from pathlib import Path

import pytest

from stoker.errors import ArtifactDamaged, LedgerStorageFailed
from stoker.journal.artifacts import ArtifactStore
from stoker.model.value import INLINE_BYTES_MAX
from stoker.seams import faultpoints


def test_small_content_stays_inline(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    value = store.put(b"x" * INLINE_BYTES_MAX)
    assert value.inline is not None
    assert list(tmp_path.iterdir()) == []
    assert store.get(value) == b"x" * INLINE_BYTES_MAX


def test_b15_large_content_goes_by_address_and_the_value_stays_small(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    content = bytes(range(256)) * 80_000
    value = store.put(content)
    assert value.inline is None
    assert value.size_bytes == len(content)
    assert store.get(value) == content


def test_the_same_content_is_stored_once(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    content = b"y" * (INLINE_BYTES_MAX + 1)
    assert store.put(content) == store.put(content)
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 1


def test_damaged_and_missing_content_is_named_not_returned(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    value = store.put(b"z" * (INLINE_BYTES_MAX + 1))
    (file,) = (p for p in tmp_path.rglob("*") if p.is_file())
    file.write_bytes(b"a" * value.size_bytes)
    with pytest.raises(ArtifactDamaged, match=value.digest):
        store.get(value)
    file.unlink()
    with pytest.raises(ArtifactDamaged, match="cannot be read"):
        store.get(value)


def test_b12_a_full_disk_refuses_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faultpoints, "_armed", {"artifact.written": ("disk_full", 1)})
    monkeypatch.setattr(faultpoints, "_reached", type(faultpoints._reached)())
    store = ArtifactStore(tmp_path)
    content = b"w" * (INLINE_BYTES_MAX + 1)
    with pytest.raises(LedgerStorageFailed, match=r"[Nn]o space"):
        store.put(content)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert store.get(store.put(content)) == content
