"""Sockets of owners: a dead owner's file goes when the next one binds, a living one's stays."""

import socket
from pathlib import Path

from stoker.broker.sockets import listen


def test_binding_removes_the_sockets_that_dead_owners_left_and_no_other(tmp_path: Path) -> None:
    with listen(tmp_path / "dead.sock"):
        pass  # closed without being unlinked, as by a kill
    (tmp_path / "no-socket.sock").write_text("somebody's file")
    with listen(tmp_path / "living.sock"), listen(tmp_path / "mine.sock"):
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"living.sock", "mine.sock", "no-socket.sock"}
        for name in ("living.sock", "mine.sock"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / name))


def test_an_owner_that_comes_again_takes_its_own_socket_over(tmp_path: Path) -> None:
    listen(tmp_path / "a.sock").close()
    with listen(tmp_path / "a.sock"), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "a.sock"))
