"""A guest writes and reads the records of a state byte for byte as the host does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sandbox.entries import Entry, Forged, decode, encode
from stoker.sandbox.guest import records

lengths = st.one_of(st.integers(0, 1 << 17), st.integers(0, (1 << 64) - 1))
names = st.one_of(st.binary(max_size=40), st.sampled_from([b"n" * 255, b"n" * 256, b"n" * 70_000]))
entries = st.builds(
    Entry,
    folder=names,
    parts=st.lists(names, max_size=20).map(tuple),
    kind=st.text(max_size=40),
    mode=st.integers(0, 0o7777),
    changed_ns=st.integers(-(1 << 63), (1 << 64) - 1),
    size_bytes=lengths,
    extents=st.lists(st.tuples(lengths, lengths), max_size=20).map(tuple),
    target=names,
)


@given(entries)
def test_equal_entries_are_equal_bytes_and_come_back(entry: Entry) -> None:
    record = encode(entry)
    assert records.packed(entry) == record
    assert Entry(*records.unpacked(record)) == decode(record) == entry  # type: ignore[arg-type]


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused_in_both(content: bytes) -> None:
    try:
        decode(content)
    except Forged:
        pass
    else:
        assert records.unpacked(content)


@pytest.mark.parametrize(
    "content", [b"", b"\xc0", b"\x91", b"\x91\xc4\x05ab", b"\x90\x00", b"\xc4\x01a"]
)
def test_what_is_no_record_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"record|something else"):
        records.unpacked(content)
