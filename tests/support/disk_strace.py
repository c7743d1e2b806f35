"""The same trace by another witness: what the kernel was asked for, as ``strace`` saw it.

Only what the order of syncs and replies needs is read: writes and syncs of files below a root, and
bytes of sockets. A call is where it *returned* for syncs and reads, where it was made for the rest.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from support.disk_trace import Event, Receive, Send, Sync, Write

COMMAND = (
    *("strace", "-f", "-y", "-xx", "-s", "1000000", "-o"),
    "{trace}",
    *("-e", "trace=pwrite64,fdatasync,fsync,sendto,recvfrom"),
)
_CALL = re.compile(
    r"^\d+ +(?P<name>\w+)\((?P<fd>\d+)<(?P<path>[^>]*)>(?P<rest>.*)\) += (?P<result>-?\d+)"
)
_BYTES = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def read_strace(trace: Path, root: Path) -> Iterator[Event]:
    """Yield the events of a single-threaded process in the order of its calls."""
    inside = str(root.resolve()) + "/"
    for line in trace.read_text("ascii").splitlines():
        call = _CALL.match(line)
        if call is None or int(call["result"]) < 0:
            continue
        path = _text(call["path"])
        if path.startswith("socket:"):
            data = _data(call["rest"])[: int(call["result"])]
            kind = Send if call["name"] == "sendto" else Receive
            yield kind(int(call["fd"]), data)
        elif path.startswith(inside):
            name = path.removeprefix(inside)
            if call["name"] == "pwrite64":
                yield Write(name, int(call["rest"].rsplit(",", 1)[1]), _data(call["rest"]))
            else:
                yield Sync(name)


def _text(path: str) -> str:
    """Return a path that ``-xx`` has written in hexadecimal."""
    return _unescaped(path).decode() if path.startswith("\\x") else path


def _data(arguments: str) -> bytes:
    found = _BYTES.search(arguments)
    return _unescaped(found.group(1)) if found else b""


def _unescaped(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
