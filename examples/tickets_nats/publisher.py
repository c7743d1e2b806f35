"""Put the tickets of a run into JetStream: ``publisher.py RUN_DIRECTORY NATS_ADDRESS``."""

import argparse
import asyncio
from pathlib import Path

from nats.js.errors import NoStreamResponseError
from queue_nats import SUBJECT, connected, make_stream

from stoker.tickets import Publisher, Ticket, open_ledger


async def publish_all(run: Path, address: str, republish_seconds: float) -> None:
    """Publish until ended; may be killed at any time and started again."""
    client, queue = await connected(address)

    async def publish(ticket: Ticket) -> None:
        try:
            await queue.publish(SUBJECT, ticket.action_id.encode())
        except NoStreamResponseError:  # a new server, or one that lost everything
            await make_stream(queue)
            raise

    try:
        async with open_ledger(run) as ledger:
            await Publisher(ledger, republish_seconds=republish_seconds).run(publish)
    finally:
        await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("address")
    parser.add_argument("--republish-seconds", type=float, default=30.0)
    given = parser.parse_args()
    asyncio.run(publish_all(given.run, given.address, given.republish_seconds))
