"""What a run and the trainer that embeds it have of each other."""

import asyncio

import msgspec

from stoker.config.tree import TrainingSettings
from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.feed import GroupFeed
from stoker.coordinator.record import RunDirectory
from stoker.inference.base import Model


class Serving(msgspec.Struct, frozen=True):
    """A run that has begun, as its trainer reaches it."""

    run: RunDirectory
    coordinator: Coordinator
    model: Model


class TrainerSeat:
    """Given to ``execute``; the run lasts until ``feed.left`` is set."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.feed = GroupFeed(settings)
        self.serving: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        """Done once there is a coordinator; ``feed.ready`` says when groups can be had."""
