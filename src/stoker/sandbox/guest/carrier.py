"""Carries a runner's frames where a guest has no port: through pipes that commands can reach.

    python -m stoker.sandbox.guest.carrier FOLDER

``FOLDER/orders`` takes lines: base64 of what the host says, or ``@NAME``: answers then go to the
pipe ``FOLDER/NAME``, base64 too, each with a full stop, after an empty one that says so. Whoever
carries a command's output out of the guest takes it for text and may divide it anew, and a guest
that was branched is heard by another command: hence all that.
"""

import base64
import os
import socket
import sys
import threading

from stoker.sandbox.guest.runner import serve_guest

_READ_BYTES = 48 * 1024
"""Divisible by three: no line but the last of an answer is padded."""


class Answers:
    """What the runner says, for whoever listens last."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pipe = -1
        self._heard = threading.Condition()

    def now_to(self, name: str) -> None:
        """Write to another pipe from now on."""
        # Open for reading too: it neither waits for its reader nor ends without one.
        opened = os.open(f"{self._folder}/{name}", os.O_RDWR | os.O_CLOEXEC)
        with self._heard:
            if self._pipe >= 0:
                os.close(self._pipe)
            self._pipe = opened
            # Orders come another way and may be faster than this name was: whoever listens gives
            # none before this one, or the answer would go to the pipe of the guest before.
            os.write(opened, b".\n")
            self._heard.notify_all()

    def _is_up(self) -> None:
        """Let whoever started this see that the runner has begun."""
        with open(f"{self._folder}/up", "wb"):  # noqa: PTH123 - the guest imports as little as it can
            pass

    def carry(self, port: socket.socket) -> None:
        """Carry until the runner ends."""
        while data := port.recv(_READ_BYTES):
            self._is_up()
            line = memoryview(base64.b64encode(data) + b".\n")
            with self._heard:
                self._heard.wait_for(lambda: self._pipe >= 0)
                while line:
                    line = line[os.write(self._pipe, line) :]
        os._exit(0)


def main() -> None:
    """Start a runner and carry for it until it ends."""
    folder = sys.argv[1]
    port, theirs = socket.socketpair()
    if os.fork() == 0:
        port.close()
        serve_guest(theirs.detach())
        os._exit(0)
    theirs.close()
    answers = Answers(folder)
    threading.Thread(target=answers.carry, args=(port,), daemon=True).start()
    # Open for writing too: between two orders it has no other writer, and must not end.
    orders = os.open(f"{folder}/orders", os.O_RDWR | os.O_CLOEXEC)
    with os.fdopen(orders, "rb", buffering=_READ_BYTES) as lines:
        for line in lines:
            if line.startswith(b"@"):
                answers.now_to(line[1:].strip().decode())
            else:
                port.sendall(base64.b64decode(line))


if __name__ == "__main__":
    main()
