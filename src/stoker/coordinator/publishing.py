"""Giving a run new weights: what happens to the calls in flight, and in which order.

The publication is written down, then the lane is brought where the mode wants it, then the model
takes the weights, then rollouts of too old a policy are truncated. Calls go on whatever happens.
"""

from typing import Literal

from stoker.coordinator.coordinator import Coordinator
from stoker.coordinator.feed import GroupFeed
from stoker.errors import BadInput, ConfigInvalid
from stoker.inference.base import Model, Updating, Weights

Mode = Literal["keep", "drain", "abort"]
MODES = ("keep", "drain", "abort")
_HOLDER = "publication"
"""Holds the lane apart from the model: servers may be paused by others meanwhile."""


async def publish(
    coordinator: Coordinator, feed: GroupFeed, model: Model, version: int,
    *, mode: Mode, weights: Weights | None,
) -> None:  # fmt: skip
    """Make ``version`` the policy; see ``training.run.Run.publish_policy``."""
    if mode not in MODES:
        raise BadInput(f"mode is {mode!r}; allowed: {', '.join(MODES)}; nothing was changed")
    if weights is not None and not isinstance(model, Updating):
        raise ConfigInvalid(
            f"the model {model.info().name} takes no weights; nothing was changed; load them where "
            "they are served and publish with weights=None"
        )
    lane = coordinator.parts.lane
    await feed.publish(version)
    coordinator.flow.parts.log.event("policy_published", version=version, mode=mode)
    if mode != "keep":
        lane.pause(_HOLDER)
    try:
        if mode == "abort":
            ended = await lane.take_back()
            coordinator.flow.parts.log.event(
                "calls_taken_back", continued=ended.continued, anew=ended.anew
            )
        if mode != "keep":
            await lane.until_idle()  # calls that were taken back let go of the engine first
        if weights is not None and isinstance(model, Updating):
            await model.take_policy(version, weights)
    finally:
        lane.resume(_HOLDER)  # kept calls were never held; what was cached is worth nothing now
    coordinator.keeper.cut_stale(list(coordinator.flow.active.values()))
