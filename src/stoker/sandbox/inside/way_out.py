"""Opens the box's door to the egress proxy, then becomes the program.

The listening socket is made here, in the box's own network namespace, and sent to the proxy, which
accepts on it: nothing stays in the box to forward anything, and there is no route and no look-up
besides. Where the proxy puts credentials in place, the channel first brings the certificate of the
authority to trust; it is added to the host's in a file of its own.

Arguments: descriptor of the channel, port, that file or ``-``, how many variables follow that are
the program's alone, these, the program and its arguments.
"""

import os
import socket
import sys

_BACKLOG = 64
_NOT_STARTED = 127
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"


def main() -> None:
    """Listen, hand the socket over, become the program; 127 where there is none."""
    open_door(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    first = 5 + int(sys.argv[4])
    for variable in sys.argv[5:first]:
        name, _, os.environ[name] = variable.partition("=")
    argv = sys.argv[first:]
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the program of the action
    except OSError as error:
        sys.stderr.write(f"stoker: cannot start {argv[0]!r}: {error.strerror}\n")
        sys.exit(_NOT_STARTED)


def open_door(channel_at: int, port: int, bundle: str) -> None:
    """Hand a listening socket over by the channel; both are closed when this returns."""
    channel = socket.socket(fileno=channel_at)
    with channel, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        # The forked actions of a box share its ports: one that was used a moment ago may be again.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(_BACKLOG)
        if bundle != "-":
            trust(channel, bundle)
        socket.send_fds(channel, [b"listening"], [listening.fileno()])


def trust(channel: socket.socket, bundle: str) -> None:
    """Write the host's authorities and the one that the channel brings."""
    length = int.from_bytes(channel.recv(4, socket.MSG_WAITALL), "big")
    ours = channel.recv(length, socket.MSG_WAITALL)
    try:
        with open(_AUTHORITIES, "rb") as known:  # noqa: PTH123 - starts fast
            theirs = known.read()
    except OSError:
        theirs = b""
    with open(bundle, "wb") as out:  # noqa: PTH123 - starts fast
        out.write(theirs + b"\n" + ours)


if __name__ == "__main__":
    main()
