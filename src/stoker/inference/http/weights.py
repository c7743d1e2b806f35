"""Which weights a server serves, and the number that stands for them in spans.

Servers name weights by text (vLLM: ``default`` until told otherwise); spans carry an integer. The
digits a name ends with are the number (``step-12`` → 12), a name without any is 0 where it is
``default`` or empty, else a number derived from it: equal names are equal numbers, without order.
"""

import re
from zlib import crc32

from stoker.errors import ModelRefused, ModelUnavailable
from stoker.inference.http.answers import WeightSpan
from stoker.inference.http.link import ServerLink
from stoker.model.generation import VersionSpan

ROUTES = {"vllm": ("/weight_info",), "sglang": ("/model_info", "/get_model_info"), "openai": ()}
_NUMBER_MAX = 2**31
_DIGITS = re.compile(r"(\d+)\D*\Z")


class Weights:
    """Asks one server which weights it serves."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self.route = ""
        """Empty: the server does not say."""
        self.version = ""
        """As of the last look."""

    async def learn(self, flavour: str) -> None:
        """Find the route that says it, if there is one."""
        for route in ROUTES[flavour]:
            self.route = route
            if await self.look():
                return
        self.route = ""

    async def look(self) -> str:
        """Return the version served now; the last one known where the server does not say."""
        if self.route:
            try:
                answer = await self._link.get(self.route)
            except (ModelRefused, ModelUnavailable):
                return self.version
            if isinstance(answer, dict) and answer.get("weight_version") is not None:
                self.version = str(answer["weight_version"])
        return self.version


def policy_version(name: str) -> int:
    """Return the number of weights ``name``; see the module."""
    if name in {"", "default"}:
        return 0
    digits = _DIGITS.search(name)
    if digits is not None and int(digits[1]) < _NUMBER_MAX:
        return int(digits[1])
    return crc32(name.encode()) % _NUMBER_MAX


def spans(
    count: int, said: tuple[WeightSpan, ...], before: str, after: str
) -> tuple[VersionSpan, ...]:
    """Return spans that cover ``count`` tokens.

    What the server says about each token is taken. Where it only says what it served ``before``
    and ``after`` the call (or with its answer: SGLang) and the two differ, all tokens carry the
    older one: staleness is never understated, though some may be newer.
    """
    if not count:
        return ()
    if said and said[-1].end >= 0:
        return tuple(
            VersionSpan(policy_version(span.version), span.start, span.end)
            for span in said
            if span.end > span.start
        )
    name = before or (said[0].version if said else after)
    return (VersionSpan(policy_version(name), 0, count),)


def gapless(found: tuple[VersionSpan, ...], count: int) -> bool:
    """Whether ``found`` covers ``[0, count)`` without gaps."""
    at = 0
    for span in found:
        if span.start != at or span.end <= at:
            return False
        at = span.end
    return at == count
