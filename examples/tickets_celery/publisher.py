"""Put the tickets of a run into Celery: ``publisher.py RUN_DIRECTORY``."""

import argparse
import asyncio
from pathlib import Path

from queue_celery import carry_out

from stoker.tickets import Publisher, Ticket, open_ledger


async def publish_all(run: Path, republish_seconds: float) -> None:
    """Publish until ended; may be killed at any time and started again."""

    async def publish(ticket: Ticket) -> None:
        await asyncio.to_thread(carry_out.delay, ticket.action_id)

    async with open_ledger(run) as ledger:
        await Publisher(ledger, republish_seconds=republish_seconds).run(publish)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--republish-seconds", type=float, default=30.0)
    given = parser.parse_args()
    asyncio.run(publish_all(given.run, given.republish_seconds))
