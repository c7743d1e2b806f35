"""Rung (c) holds exactly as ``stoker doctor`` reports it (CASES A1-A5, A8-A12, A16).

One ordinary user is asked what its doctor found and then attacked. Where a limit is *enforced* the
verdict is exact; where it is *best effort* the verdict may differ, and what must hold all the same
is asserted: the attack did not get what it wanted, everything is dead, nothing of the host is seen.
"""

from collections.abc import Callable

import msgspec
import pytest

from stoker.model.execution import MEBIBYTE, Rung
from stoker.model.tools import LimitKind
from stoker.sandbox.canary import namespace_strengths
from stoker.sandbox.local import Parts
from support import attacks, sandbox
from support.sandbox import MARK, SMALL, Attack, Seen

ENFORCED, BEST_EFFORT = "enforced", "best effort"
LEVELS = {
    "memory": BEST_EFFORT,
    "cpu": BEST_EFFORT,
    "processes": BEST_EFFORT,
    "disk": BEST_EFFORT,
    "wall": ENFORCED,
    "output": ENFORCED,
    "network": ENFORCED,
    "kernel settings": ENFORCED,
    "host environment": ENFORCED,
    "nothing survives": ENFORCED,
}
SCRIPT = """
import asyncio, sys
from pathlib import Path
import msgspec
from stoker.sandbox.trials import try_host
from support import sandbox
sandbox.MARK = sys.argv[2]
rung = sandbox.Rung.USER_NAMESPACE
given = msgspec.json.decode(sys.stdin.buffer.read(), type=dict[str, sandbox.Attack])
async def main():
    report = await try_host(Path(sys.argv[1]) / "doctor")
    levels = {s.limit: s.level for o in report.offers if o.rung is rung for s in o.strengths}
    seen = {name: await sandbox.attack_here(Path(sys.argv[1]) / name, rung, attack)
            for name, attack in given.items()}
    sys.stdout.buffer.write(msgspec.json.encode([levels, seen]))
asyncio.run(main())
"""


class Case(msgspec.Struct, frozen=True):
    """One attack, the limit it meets and what must be seen."""

    limit: str
    attack: Attack
    holds: Callable[[Seen], object]


def _attack(command: attacks.Command, **options: object) -> Attack:
    return Attack(argv=command, **options)  # type: ignore[arg-type]


def _flooded(seen: Seen) -> bool:
    streams = (seen.run.result.stdout, seen.run.result.stderr)
    return seen.run.result.limit is LimitKind.OUTPUT and any(
        s.truncated and len(s.kept) == SMALL.output_bytes for s in streams
    )


def _starved(seen: Seen) -> bool:
    """Whether a hog did not get its memory, whoever refused it."""
    result = seen.run.result
    refused = result.limit is LimitKind.MEMORY or b"MemoryError" in result.stderr.kept
    return refused and b"had it all" not in result.stdout.kept


def _both_whole(seen: Seen) -> bool:
    result = seen.run.result
    return all(
        stream.kept == attacks.whole_stream(letter, 160_910) and not stream.truncated
        for stream, letter in ((result.stdout, b"o"), (result.stderr, b"e"))
    )


def _stopped_at_its_time(seen: Seen) -> bool:
    return seen.run.result.timed_out and seen.run.result.limit is None


def _partial(seen: Seen) -> bool:
    kept = (seen.run.result.stdout.kept, seen.run.result.stderr.kept)
    return _stopped_at_its_time(seen) and kept == (b"first\n", b"second\n")


def _stdout(content: bytes) -> Callable[[Seen], bool]:
    return lambda seen: seen.run.result.ok and seen.run.result.stdout.kept == content


BUSY = msgspec.structs.replace(SMALL, cpu_seconds=0.6)
CASES = {
    "A1": Case("nothing survives", _attack(attacks.BACKGROUND_CHILD), _stdout(b"now\n")),
    "A2": Case("nothing survives", _attack(attacks.TWICE_FORKED), lambda s: s.run.result.ok),
    "A3 ignores": Case(
        "wall", _attack(attacks.IGNORES_TERM, timeout_seconds=0.5), _stopped_at_its_time
    ),
    "A3 stops": Case(
        "wall", _attack(attacks.STOPS_ITSELF, timeout_seconds=0.5), _stopped_at_its_time
    ),
    "A3 kills": Case(
        "wall", _attack(attacks.KILLS_EVERYTHING, timeout_seconds=1.0), _stopped_at_its_time
    ),
    "A4": Case(
        "cpu",
        _attack(attacks.python(attacks.REFORK), limits=BUSY, timeout_seconds=sandbox.PATIENCE),
        lambda s: s.run.result.limit is LimitKind.CPU,
    ),
    "A5": Case("memory", _attack(attacks.python(attacks.HOG)), _starved),
    "A5 child": Case("memory", _attack(attacks.HOG_IN_A_CHILD), _starved),
    **{
        f"A8 {name}": Case("output", _attack(flood), _flooded)
        for name, flood in attacks.FLOODS.items()
    },
    "A9": Case("output", _attack(attacks.both_streams(160_910)), _both_whole),
    "A10": Case("output", _attack(attacks.EVERY_BYTE), _stdout(attacks.EVERY_BYTE_WRITES)),
    "A11": Case("wall", _attack(attacks.PARTIAL_OUTPUT, timeout_seconds=1.5), _partial),
    "A12": Case("wall", _attack(attacks.WANTS_STDIN), _stdout(b"done\n")),
    "A12 unread": Case(
        "wall", _attack(attacks.NEVER_READS, stdin=bytes(5 * MEBIBYTE)), _stdout(b"done\n")
    ),
    "A16 settings": Case(
        "kernel settings", _attack(attacks.python(attacks.WRITE_BACK)), _stdout(b"refused\n" * 2)
    ),
    "A16 environment": Case(
        "host environment",
        _attack(attacks.python(attacks.ENVIRONMENTS)),
        lambda s: s.run.result.ok and b"PYTHONPATH" not in s.run.result.stdout.kept,
    ),
}
Told = tuple[dict[str, str], dict[str, Seen]]


@pytest.fixture(scope="module")
def told() -> Told:
    given = msgspec.json.encode({name: case.attack for name, case in CASES.items()})
    said = sandbox.ordinary_output(SCRIPT, MARK, given=given)
    return msgspec.json.decode(said, type=Told)


def test_doctor_reports_each_limit_of_rung_c(told: Told) -> None:
    levels, _ = told
    assert levels == LEVELS


def test_what_is_offered_is_what_was_tried(told: Told) -> None:
    levels, _ = told
    parts = Parts(rung=Rung.USER_NAMESPACE, leased_uid=False, sized_mounts=False, group=False)
    offered = {strength.limit: strength.level for strength in namespace_strengths(parts)}
    assert offered == {limit: levels[limit] for limit in offered}


@pytest.mark.parametrize("name", CASES)
def test_rung_c_holds_as_its_level_says(told: Told, name: str) -> None:
    levels, seen = told
    case = CASES[name]
    assert levels[case.limit] == LEVELS[case.limit]
    assert case.holds(seen[name]), seen[name].run.result.text[-2000:]
    assert seen[name].survivors == []
    assert seen[name].leaked == 0
