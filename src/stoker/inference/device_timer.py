"""A simulated device in the running loop's time: one timer for its next change.

Nothing polls and no token costs a wake-up.
"""

import asyncio

from stoker.errors import ModelUnavailable
from stoker.inference.base import DeviceLoad
from stoker.inference.device import Device, DeviceCall
from stoker.inference.profile import SimProfile

_BEGIN_TURNS = 4
"""Turns of the loop, not time, between a step's answers and the next step: a lane that hands a
place on to the next ready call needs two. A server that begins at once would lose that place for a
whole step, which is right for distant clients and wrong for the step times people measure."""


class TimedDevice:
    """One device and the timer that drives it; made on the loop that uses it."""

    def __init__(self, profile: SimProfile) -> None:
        self._loop = asyncio.get_running_loop()
        self._device = Device(profile, self._loop.time())
        self._waiters: dict[DeviceCall, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._turns_left = 0

    async def run(self, call: DeviceCall) -> None:
        """Return when the device has finished ``call``."""
        self._pump()
        done = self._waiters[call] = self._loop.create_future()
        self._device.submit(call, self._loop.time())
        self._set_timer()
        try:
            await done
        finally:
            if self._waiters.pop(call, None) is not None:
                self._pump()
                self._device.abort(call, self._loop.time())
                self._set_timer()

    def load(self) -> DeviceLoad:
        """Return what the device has done up to now; exact."""
        self._pump()
        return self._device.load()

    def close(self) -> None:
        """Stop its timer; who waits is told that the server is gone."""
        if self._timer is not None:
            self._timer.cancel()
        for done in self._waiters.values():
            if not done.done():
                done.set_exception(ModelUnavailable("the simulated server was closed"))

    def _pump(self) -> None:
        for call in self._device.advance(self._loop.time()):
            done = self._waiters.pop(call, None)
            if done is not None and not done.done():
                done.set_result(None)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._device.start_at is not None and not self._turns_left:
            self._turns_left = _BEGIN_TURNS
            self._loop.call_soon(self._count_down)
        at = self._device.next_event()
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._fired) if at is not None else None

    def _count_down(self) -> None:
        self._turns_left -= 1
        if self._turns_left:
            self._loop.call_soon(self._count_down)
            return
        self._device.begin()
        self._pump()

    def _fired(self) -> None:
        self._timer = None
        self._pump()
