"""Opens the box's door to the egress proxy, then becomes the program.

The listening socket is made here, in the box's own network namespace, and sent to the proxy, which
accepts on it: nothing stays in the box to forward anything, and there is no route and no look-up
besides. Arguments: descriptor of the channel, port, the program and its arguments.
"""

import os
import socket
import sys

_BACKLOG = 64
_NOT_STARTED = 127


def main() -> None:
    """Listen, hand the socket over, become the program; 127 where there is none."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", int(sys.argv[2])))
        listening.listen(_BACKLOG)
        socket.send_fds(channel, [b"listening"], [listening.fileno()])
    argv = sys.argv[3:]
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the program of the action
    except OSError as error:
        sys.stderr.write(f"stoker: cannot start {argv[0]!r}: {error.strerror}\n")
        sys.exit(_NOT_STARTED)


if __name__ == "__main__":
    main()
