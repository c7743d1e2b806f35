"""When an owner ends by itself: once nobody who said what it is has been there for a while."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.broker.base import CapabilitiesRequest, Durability, LedgerLimits
from stoker.broker.exchange import Exchange
from stoker.broker.owner import publish
from stoker.broker.server import Server
from stoker.broker.service import LedgerService
from stoker.broker.sockets import listen
from stoker.broker.store_memory import MemoryStore
from stoker.seams.clock import SystemClock
from support.ledger_process import RawPeer

DEADLINE_SECONDS = 20.0


class Leaping(SystemClock):
    """A clock that a test may set ahead."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@contextmanager
def serving(place: Path, clock: SystemClock, idle_exit: float) -> Iterator[threading.Thread]:
    """Serve ``place`` in a thread that is stopped at last."""
    service = LedgerService(MemoryStore(), LedgerLimits(), Durability.POWER_SAFE)
    service.open(clock.now(), boot_id="boot", lineage="lin_1")
    server = Server(Exchange(service), listen(place / "mine.sock"), clock, idle_exit)
    publish(place, place / "mine.sock")
    thread = threading.Thread(target=server.serve)
    with socket.socket(socket.AF_UNIX) as knock:
        knock.connect(str(place / "mine.sock"))  # as a new owner does with each of its neighbours
        thread.start()
        try:
            yield thread
        finally:
            server.stop()
            thread.join()
            server.close()


def test_an_owner_that_others_only_knock_at_ends_by_itself(tmp_path: Path) -> None:
    with serving(tmp_path, SystemClock(), idle_exit=0.05) as owner:
        owner.join(DEADLINE_SECONDS)
        assert not owner.is_alive()


def test_an_owner_stays_for_a_peer_that_is_silent_for_long(tmp_path: Path) -> None:
    clock = Leaping()
    with serving(tmp_path, clock, idle_exit=60.0):
        peer = RawPeer(tmp_path)
        clock.ahead = 3600.0
        for _ in range(2):  # the second is answered only if it went on after the hour
            peer.ask(CapabilitiesRequest())
        peer.close()
