"""Ending our calls on one server, and no others': each is answered with what it has sampled.

vLLM's ``/abort_requests`` (with ``VLLM_SERVER_DEV_MODE=1``; ``--enable-scale-out`` has it under
``/inference/v1``) and SGLang's ``/abort_request`` do that by request id. A call may be on its way
to the server when it is asked, which then knows no such call: it is asked again until all are gone.
"""

import asyncio
from contextlib import suppress

from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.http.link import ServerLink
from stoker.inference.http.probe import Offer

_AGAIN_SECONDS = 0.2
_PREFIXES = ("chatcmpl-{}", "cmpl-{}-0", "generate-tokens-{}")
"""What vLLM makes of a request id, by route; ids it does not know are passed over."""


class Interruption:
    """The calls in flight on one server."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self._calls = 0
        self._sent: set[str] = set()
        self._ended = asyncio.Event()
        self.under_way = False
        """Calls are being ended: none is sent any more."""

    def begun(self) -> None:
        """Count a call in, whatever it does first."""
        self._calls += 1

    def over(self) -> None:
        """Count a call out, however it went."""
        self._calls -= 1
        if not self._calls:
            self._ended.set()

    def sent(self, rid: str) -> None:
        """Note that ``rid`` goes to the server.

        Raises:
            ModelUnavailable: calls are just being ended.
        """
        if self.under_way:
            raise ModelUnavailable(f"call {rid} was taken back before it was sent", request_id=rid)
        self._sent.add(rid)

    def answered(self, rid: str) -> None:
        """Note that ``rid`` is no longer on the server."""
        self._sent.discard(rid)

    async def end(self, offer: Offer) -> None:
        """Have every call in flight aborted; return once there is none, or it cannot be done.

        Raises:
            ModelUnavailable: the server gives no answer; calls may go on.
        """
        self._ended.clear()
        self.under_way = True
        try:
            while self._calls:
                await self._ask(offer)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_SECONDS):
                        await self._ended.wait()
        except ModelRefused:
            return  # no such route: an older server
        finally:
            self.under_way = False

    async def _ask(self, offer: Offer) -> None:
        sent = tuple(self._sent)
        if offer.flavour == "sglang":
            await asyncio.gather(*(self._link.told("/abort_request", {"rid": rid}) for rid in sent))
        elif sent:
            ids = [prefix.format(rid) for rid in sent for prefix in _PREFIXES]
            route = "/abort_requests" if offer.pauses else "/inference/v1/abort_requests"
            await self._link.told(route, {"request_ids": ids})
