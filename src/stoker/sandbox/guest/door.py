"""The way out of a guest: where its programs find the egress proxy, on their own loopback.

There is no network device. The runner listens, and each connection is a stream between the program
and the host, who has the proxy serve it. It is opened before the program begins and closed when
everything of the action is dead.
"""

import contextlib
import socket

from stoker.sandbox.guest.action import Stream, Watch
from stoker.sandbox.guest.wire import CONNECTIONS_MAX, DOOR_FIRST


class Door:
    """Of one action."""

    def __init__(self, watch: Watch, port: int) -> None:
        self.streams: dict[int, Stream] = {}
        self._watch = watch
        self._next = DOOR_FIRST
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # The port of the action before may be free since a moment only.
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(("127.0.0.1", port))
            self._listening.listen(CONNECTIONS_MAX)
            self._listening.setblocking(False)
        except OSError:
            self._listening.close()
            raise
        watch.reads(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it went away again, or there is no memory for it
            return
        for number in [number for number, stream in self.streams.items() if stream.over]:
            self.streams.pop(number).drop()
        if len(self.streams) >= CONNECTIONS_MAX:
            connection.close()
            return
        self._watch.send("connected", stream=self._next)
        self.streams[self._next] = Stream(
            self._watch, self._next, connection.detach(), both_ways=True
        )
        self._next += 1

    def close(self) -> None:
        """End every connection."""
        with contextlib.suppress(OSError):
            self._watch.forget(self._listening.fileno())
        self._listening.close()
        for stream in self.streams.values():
            stream.drop()
        self.streams.clear()
