"""Records of a state as a guest writes and reads them, which has no msgspec: some of MessagePack.

Whole numbers, bytes, text and arrays, each in its shortest form, as msgspec writes them: equal
states of a guest and of the host are equal byte for byte.
"""

import struct

Value = int | bytes | str | tuple["Value", ...]

_FIX_ARRAY, _FIX_TEXT, _FIX_MAX, _FIX_TEXT_MAX = 0x90, 0xA0, 15, 31
_NEGATIVE_FIX = 0xE0
_BYTES = ((0xC4, ">B"), (0xC5, ">H"), (0xC6, ">I"))
_TEXTS = ((0xD9, ">B"), (0xDA, ">H"), (0xDB, ">I"))
_ARRAYS = ((0xDC, ">H"), (0xDD, ">I"))
_COUNTS = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
_NEGATIVES = ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))

_Forms = tuple[tuple[int, str], ...]


def packed(value: Value) -> bytes:
    """Return one record."""
    into = bytearray()
    _pack(value, into)
    return bytes(into)


def unpacked(content: bytes) -> tuple[Value, ...]:
    """Return what a record holds.

    Raises:
        ValueError: it is none, or something follows it.
    """
    try:
        value, at = _unpack(content, 0)
    except (struct.error, IndexError) as error:
        raise ValueError("a record ends early") from error
    if at != len(content) or not isinstance(value, tuple):
        raise ValueError("no record")
    return value


def _pack(value: Value, into: bytearray) -> None:
    if isinstance(value, tuple):
        if len(value) <= _FIX_MAX:
            into.append(_FIX_ARRAY | len(value))
        else:
            _form(_ARRAYS, len(value), into)
        for one in value:
            _pack(one, into)
    elif isinstance(value, bytes):
        _form(_BYTES, len(value), into)
        into += value
    elif isinstance(value, str):
        text = value.encode()
        if len(text) <= _FIX_TEXT_MAX:
            into.append(_FIX_TEXT | len(text))
        else:
            _form(_TEXTS, len(text), into)
        into += text
    elif -32 <= value < 128:  # noqa: PLR2004 - they are their own form
        into.append(value & 0xFF)
    else:
        _form(_COUNTS if value > 0 else _NEGATIVES, value, into)


def _form(forms: _Forms, number: int, into: bytearray) -> None:
    for head, form in forms:
        try:
            packed = struct.pack(form, number)
        except struct.error:
            continue
        into.append(head)
        into += packed
        return
    raise OverflowError(f"{number} fits no record")


_LENGTHS = dict((*_BYTES, *_TEXTS, *_ARRAYS))
_NUMBERS = dict((*_COUNTS, *_NEGATIVES))
_TEXT_HEADS = {head for head, _ in _TEXTS}
_ARRAY_HEADS = {head for head, _ in _ARRAYS}


def _unpack(content: bytes, at: int) -> tuple[Value, int]:
    head, at = content[at], at + 1
    if head < 0x80 or head >= _NEGATIVE_FIX:  # noqa: PLR2004 - they are their own form
        return head if head < _NEGATIVE_FIX else head - 256, at
    if head in _NUMBERS:
        form = _NUMBERS[head]
        (number,) = struct.unpack_from(form, content, at)
        return number, at + struct.calcsize(form)
    if head in _LENGTHS:
        form = _LENGTHS[head]
        (length,) = struct.unpack_from(form, content, at)
        at += struct.calcsize(form)
    elif _FIX_ARRAY <= head < _FIX_TEXT + _FIX_TEXT_MAX + 1:
        length = head & (_FIX_TEXT_MAX if head >= _FIX_TEXT else _FIX_MAX)
    else:
        raise ValueError("something else than numbers, bytes, text and arrays")
    if head in _ARRAY_HEADS or head < _FIX_TEXT:
        items = []
        for _ in range(length):
            item, at = _unpack(content, at)
            items.append(item)
        return tuple(items), at
    held = content[at : at + length]
    if len(held) != length:
        raise ValueError("a record ends early")
    return (held.decode() if head in _TEXT_HEADS or head < 0xC0 else held), at + length  # noqa: PLR2004 - forms of text
