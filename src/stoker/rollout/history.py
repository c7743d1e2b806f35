"""Replay checks: every call of the program against the journal, from both ends.

A difference raises ``NonDeterministicRollout`` to the *host*, never into the program, which could
swallow it. The message shows both calls as JSON with their difference and where the program stands.
"""

import difflib
from collections.abc import Callable
from typing import Any

import msgspec

from stoker.errors import NonDeterministicRollout
from stoker.model.ids import CallPath
from stoker.rollout.messages import HostCall, RecordedCall, RecordedTurn
from stoker.rollout.position import standing as standing_at

_REMEDY = (
    "the rollout cannot be resumed as it was; look for time, random, uuid, files, set order or a "
    "changed program, or start it anew with --changed restart"
)


class TurnCheck:
    """Compares one replayed turn with its record."""

    def __init__(self, turn: RecordedTurn, *, number: int) -> None:
        self._turn = turn
        self._number = number
        """Calls of the whole journal before this turn."""
        self._seen = 0

    def issued(self, call: HostCall, coroutine: object) -> None:
        """Compare the next call.

        Raises:
            NonDeterministicRollout: it is not the one in the journal.
        """
        number = self._number + self._seen
        if self._seen == len(self._turn.calls):
            raise _differs(
                f"call number {number} is not in the journal "
                f"(program stands at {standing_at(coroutine)})\n"
                f"  program: {call.path} {call.verb}\n{_indented(_shown(call.arguments))}"
            )
        recorded = self._turn.calls[self._seen]
        self._seen += 1
        if (recorded.path, recorded.verb, recorded.digest) != (call.path, call.verb, call.digest):
            raise _differs(_call_difference(number, recorded, call, standing_at(coroutine)))

    def complete(self, withdrawn: tuple[CallPath, ...], standing: Callable[[], str]) -> None:
        """Check, at the end of the turn, that nothing in the journal is left.

        Raises:
            NonDeterministicRollout: the journal holds more than the program did.
        """
        if self._seen < len(self._turn.calls):
            missing = self._turn.calls[self._seen]
            raise _differs(
                f"the journal holds call number {self._number + self._seen}, which the program "
                f"did not make (program stands at {standing()})\n"
                f"  journal: {missing.path} {missing.verb}\n{_indented(_recorded(missing))}"
            )
        if withdrawn != self._turn.withdrawn:
            raise _differs(
                f"the program stopped waiting for {list(withdrawn)}, the journal says "
                f"{list(self._turn.withdrawn)} (program stands at {standing()})"
            )


def unknown_result(path: CallPath, where: str) -> NonDeterministicRollout:
    """Return the error for a journalled result that nothing in the program waits for."""
    return _differs(
        f"the journal holds a result for call {path}, which the program does not wait for "
        f"(program stands at {where})"
    )


def _differs(what: str) -> NonDeterministicRollout:
    return NonDeterministicRollout(f"{what}\n{_REMEDY}")


def _call_difference(number: int, recorded: RecordedCall, call: HostCall, where: str) -> str:
    lines = difflib.unified_diff(
        _recorded(recorded).splitlines(), _shown(call.arguments).splitlines(), n=1, lineterm=""
    )
    changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return "\n".join(
        [
            f"call number {number} differs from the journal (program stands at {where})",
            f"  journal: {recorded.path} {recorded.verb}        program: {call.path} {call.verb}",
            *(f"  {line}" for line in changed),
        ]
    )


def _recorded(call: RecordedCall) -> str:
    if call.arguments.inline is None:
        return f"(arguments of {call.arguments.size_bytes} bytes in {call.arguments.digest})"
    return _shown(call.arguments.inline)


def _shown(arguments: bytes) -> str:
    decoded: Any = msgspec.msgpack.decode(arguments)
    if isinstance(decoded, dict) and isinstance(decoded.get("request"), bytes):
        decoded["request"] = msgspec.msgpack.decode(decoded["request"])
    return msgspec.json.format(msgspec.json.encode(decoded), indent=2).decode()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
