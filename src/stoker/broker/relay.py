"""A ledger's socket for other machines: bytes between TLS connections and what serves it here.

Whoever shows the gateway key is connected to the ledger of one directory; what serves it is started
when nobody does. The relay understands nothing of what passes: requests, replies and their order
are the two ends' own. When one side hangs up, so does the other, and clients connect again.
"""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from stoker.broker.network import Address, listening_context, notice_silence
from stoker.broker.spawn import OwnerSettings, published_socket, spawn_owner
from stoker.errors import ConfigInvalid, LedgerUnavailable, StokerError

_READ_BYTES = 256 * 1024
_TRIES = 50
_RETRY_SECONDS = 0.1
_HANDSHAKE_SECONDS = 10.0
_GOODBYE_SECONDS = 1.0
_log = logging.getLogger("stoker.ledger")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Listens at one address for the ledger of one directory."""

    def __init__(self, directory: Path, settings: OwnerSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._server: asyncio.Server
        self._peers: set[asyncio.Task[None]] = set()

    async def open(self, address: Address, key: Path) -> Address:
        """Listen; return where, port 0 being any free one.

        Raises:
            ConfigInvalid: the key or the address cannot be used, or the ledger refuses to start.
        """
        context = listening_context(key)
        (await self._local())[1].close()  # what can be refused is refused before anybody comes
        try:
            self._server = await asyncio.start_server(
                self._serve,
                address.host,
                address.port,
                ssl=context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )
        except OSError as error:
            raise ConfigInvalid(
                f"the gateway cannot listen on {address}: {error.strerror or error}; nothing was "
                "started; choose another address with --listen"
            ) from None
        return Address(address.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and hang up on everybody; the ledger lives on."""
        self._server.close()
        for task in self._peers:
            task.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "start_server makes a task for each peer"
        self._peers.add(task)
        notice_silence(writer.get_extra_info("socket"))
        local: asyncio.StreamWriter | None = None
        try:
            inner, local = await self._local()
            ways = [
                asyncio.create_task(_pass_on(reader, local)),
                asyncio.create_task(_pass_on(inner, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        except StokerError as error:
            _log.warning("a peer was not connected: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            for end in (writer, local):
                if end is not None:
                    end.close()
                    with suppress(OSError):
                        await end.wait_closed()
            self._peers.discard(task)

    async def _local(self) -> Streams:
        """Connect to the ledger here; start it where nobody serves it."""
        for _ in range(_TRIES):
            path = published_socket(self._directory)
            if path is not None:
                with suppress(OSError):
                    return await asyncio.open_unix_connection(str(path))
            await asyncio.to_thread(spawn_owner, self._directory, self._settings)
            await asyncio.sleep(_RETRY_SECONDS)
        raise LedgerUnavailable(
            f"nothing serves the ledger of {self._directory}; look at its ledger.log"
        )


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copy until one side ends; waits for a side that does not read."""
    with suppress(OSError):
        while data := await source.read(_READ_BYTES):
            sink.write(data)
            await sink.drain()
