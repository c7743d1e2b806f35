"""Carry out tools as JetStream hands them out: ``consumer.py RUN_DIRECTORY NATS_ADDRESS NAME``."""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from queue_nats import connected, subscribed

from stoker.errors import StokerError
from stoker.tickets import TicketWorker

AT_ONCE = 4
"""Messages in hand; more than the worker has slots, so that none stands idle."""


async def consume(run: Path, address: str, name: str) -> None:
    """Take tickets until ended; may be killed at any time and started again."""
    client, queue = await connected(address)
    room = asyncio.Semaphore(AT_ONCE)
    try:
        async with TicketWorker(run, "tools", name=name) as worker, asyncio.TaskGroup() as tasks:

            async def carry_out(message: Msg) -> None:
                try:
                    spent = await worker.run(message.data.decode())
                except StokerError:
                    spent = False
                finally:
                    room.release()
                with suppress(nats.errors.Error):  # unheard: it comes again, with nothing to do
                    await (message.ack() if spent else message.nak(delay=1))

            await room.acquire()
            async for message in messages(queue):
                tasks.create_task(carry_out(message))
                await room.acquire()
    finally:
        await client.close()


async def messages(queue: JetStreamContext) -> AsyncIterator[Msg]:
    """Yield messages, through every restart of the server."""
    while True:
        with suppress(nats.errors.Error):
            tickets = await subscribed(queue)
            while True:
                with suppress(nats.errors.TimeoutError):
                    yield (await tickets.fetch(1, timeout=5))[0]
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("address")
    parser.add_argument("name", help="stable, and another one for each consumer")
    given = parser.parse_args()
    asyncio.run(consume(given.run, given.address, given.name))
