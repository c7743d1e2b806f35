"""The JetStream queue both ends agree on: one subject, one durable consumer, made where missing."""

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, RetentionPolicy, StorageType, StreamConfig

SUBJECT = "tickets.tools"
STREAM = "TICKETS"
DURABLE = "tools"


async def connected(address: str) -> tuple[Client, JetStreamContext]:
    """Connect, through every restart of the server."""
    client = Client()
    await client.connect(
        address, max_reconnect_attempts=-1, reconnect_time_wait=0.2, error_cb=_away
    )
    return client, client.jetstream(timeout=5)


async def make_stream(queue: JetStreamContext) -> None:
    """Make the stream; does nothing where it is there."""
    await queue.add_stream(
        StreamConfig(
            name=STREAM,
            subjects=[SUBJECT],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
        )
    )


async def subscribed(queue: JetStreamContext) -> JetStreamContext.PullSubscription:
    """Join the consumers; the server hands a message out again after ten seconds of silence."""
    await make_stream(queue)
    config = ConsumerConfig(ack_wait=10, max_ack_pending=1000)
    return await queue.pull_subscribe(SUBJECT, DURABLE, config=config)


async def _away(_: Exception) -> None:
    """A server that is away comes back; what waits is tried again by whoever needs it."""
