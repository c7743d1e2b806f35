"""How many worker slots would keep tools from holding the lane up: X·Z, by Little's law.

X: actions of a class a second while the lane runs at full windows, from the actions each model call
has led to so far; Z: how long one holds a slot. With fewer slots than that the tools are the
bottleneck, whatever the lane does; some more let queues stay short.
"""

from collections.abc import Mapping

from stoker.coordinator.lane_figures import LaneFigures

ACTIONS_MIN = 20
"""Of a class, before anything is said of it."""


def slots_needed(
    lane: LaneFigures, finished: Mapping[str, int], slot_seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return worker class → X·Z; classes and lanes of which too little is known are left out.

    ``finished``: actions by class, ``slot_seconds``: how long they held slots together.
    """
    calls = lane.capacity_calls_per_second
    if calls is None and lane.service_seconds:
        calls = lane.window / lane.service_seconds
    if not calls or not lane.calls:
        return {}
    return {
        name: calls * count / lane.calls * slot_seconds.get(name, 0.0) / count
        for name, count in finished.items()
        if count >= ACTIONS_MIN
    }
