"""One fault script on our ledger and on other queues: what is lost, doubled or stuck.

``python tools/bench_faults/faults.py [--only celery,rq] [--faults kill_before] [--json FILE]``: one
system after the other; what it found is added to FILE and the table is of all that is there. Peers
are found in ``.venv-peers`` (``make bench-peers``). What counts is the tool's own log: a job
*begins* and *acts* by a line each. A job that acted once and is known to be done is *once*; acted
twice is *doubled*; never, and the system says it failed, *told*; never, while the system holds it
for unfinished when its time is up, *stuck*; never, and it cannot be asked, *not done*; never,
though it says it was done, *lost*.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from systems import LEASE_SECONDS, SLOTS, SYSTEMS, System

BEGIN_SECONDS = 40.0
LONG_SECONDS = 40.0


class Script:
    """One system in one scenario."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.jobs: dict[str, str] = {}
        """Our key → the system's id."""

    def submit(self, kind: str, count: int = 1) -> list[str]:
        """Hand in jobs; return their keys."""
        keys = [f"{kind}-{len(self.jobs) + n}" for n in range(count)]
        self.jobs |= zip(keys, self.system.submit(kind, keys), strict=True)
        return keys

    def count(self, what: str) -> Counter[str]:
        """Count lines of one kind by key."""
        log = self.system.log
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(line.split()[1] for line in lines if line.split()[0] == what)

    def until(self, what: str, keys: list[str]) -> None:
        """Wait until every job has left a line."""
        deadline = time.monotonic() + BEGIN_SECONDS
        while not all(self.count(what)[key] for key in keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{keys} never {what}")
            time.sleep(0.02)

    def settle(self, *, supervised: bool = False) -> None:
        """Give it time to put things right: long enough for a second effect to show.

        ``supervised``: a worker that ends is started again, as whoever runs one would have it.
        """
        deadline = time.monotonic() + self.system.settle_seconds
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if supervised and self.system.workers[-1].poll() is not None:
                self.system.start_worker()

    def verdict(self, keys: list[str]) -> str:
        """Say what became of jobs."""
        acted = self.count("acted")
        found: Counter[str] = Counter()
        for key in keys:
            state = self.system.state(self.jobs[key])
            if acted[key] > 1:
                found["doubled"] += 1
            elif acted[key] == 1:
                ends = {"waiting": "once (no end told)", "failed": "once (told as unknown)"}
                found[ends.get(state, "once")] += 1
            elif state in ("failed", "cancelled"):
                found["told"] += 1
            else:
                ends = {"waiting": "stuck", "unknown": "not done"}
                found[ends.get(state, "lost")] += 1
        return ", ".join(f"{name} {number}" for name, number in found.items())


def kill_before(script: Script) -> str:
    """SIGKILL of the worker while jobs run, before their effect; another is started."""
    keys = script.submit("before", SLOTS)
    script.until("begun", keys)
    script.system.signal_worker(signal.SIGKILL)
    script.system.start_worker()
    script.settle()
    return script.verdict(keys)


def kill_after(script: Script) -> str:
    """SIGKILL of the worker after the effect, before the job has ended."""
    keys = script.submit("after", SLOTS)
    script.until("acted", keys)
    script.system.signal_worker(signal.SIGKILL)
    script.system.start_worker()
    script.settle()
    return script.verdict(keys)


def stop(script: Script) -> str:
    """SIGSTOP of the worker for two leases, with another there, then SIGCONT."""
    keys = script.submit("before", SLOTS)
    script.until("begun", keys)
    script.system.signal_worker(signal.SIGSTOP)
    script.system.start_worker()
    time.sleep(2 * LEASE_SECONDS)
    script.system.signal_worker(signal.SIGCONT)
    script.settle()
    return script.verdict(keys)


def gil(script: Script) -> str:
    """A job that holds the interpreter for two leases, with another worker there."""
    script.system.start_worker()
    keys = script.submit("gil")
    script.until("begun", keys)
    time.sleep(2 * LEASE_SECONDS)
    script.settle()
    return script.verdict(keys)


def broker(script: Script) -> str:
    """SIGKILL and restart of the broker while jobs run and others wait."""
    keys = script.submit("before", 2 * SLOTS)
    script.until("begun", keys[:1])
    script.system.restart_broker()
    script.settle()
    return script.verdict(keys)


def poison(script: Script) -> str:
    """A job that kills the process it runs in, four others behind it, and a supervisor."""
    bad = script.submit("poison")
    keys = script.submit("plain", 4)
    script.settle(supervised=True)
    begun = script.count("begun")[bad[0]]
    waits = script.system.state(script.jobs[bad[0]]) in ("waiting", "unknown")
    itself = "no end told" if waits else "its end told"
    return f"others {script.verdict(keys)}; itself {begun} tries, {itself}"


def cancel(script: Script) -> str:
    """Cancel of two running and two queued jobs."""
    keys = script.submit("long", 2 * SLOTS)
    script.until("begun", keys[:1])
    if not script.system.cancel([script.jobs[key] for key in keys]):
        return "no cancel"
    time.sleep(LONG_SECONDS)
    script.settle()
    acted = script.count("acted")
    ran = sum(acted[key] > 0 for key in keys)
    waiting = sum(script.system.state(script.jobs[key]) == "waiting" for key in keys)
    ended = f"ended {len(keys) - ran - waiting}"
    return ended + f", ran all the same {ran}" * bool(ran) + f", stuck {waiting}" * bool(waiting)


FAULTS: dict[str, Callable[[Script], str]] = {
    one.__name__: one for one in (kill_before, kill_after, stop, gil, broker, poison, cancel)
}


def tried(name: str, fault: str, peers: Path, folder: Path) -> str:
    """Run one scenario on a fresh system; a system that cannot be driven says why."""
    system = SYSTEMS[name](folder / f"{name}-{fault}", peers)
    try:
        system.begin()
        system.start_worker()
        return FAULTS[fault](Script(system))
    except Exception as error:  # noqa: BLE001 - a peer may raise anything; the others go on
        return f"not measured: {str(error).strip().splitlines()[-1][:120]}"
    finally:
        try:
            system.end()
        except Exception as error:  # noqa: BLE001 - the same
            print(f"{name}: {error}", file=sys.stderr)


def main() -> None:
    """Run the script and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SYSTEMS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--at-once", type=int, default=1, help="scenarios of a system side by side")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    peers, folder = given.peers.absolute(), Path(tempfile.mkdtemp(prefix="stoker-faults-"))
    folder.chmod(0o755)  # PostgreSQL's own user must get to its cluster
    document: dict[str, Any] = {"systems": {}}
    if given.json and given.json.exists():
        document = json.loads(given.json.read_bytes())
    for name in given.only.split(","):
        if not name.startswith("stoker") and not (peers / "bin" / "python").exists():
            print(f"{name}: not installed; make bench-peers", file=sys.stderr)
            continue
        kind = SYSTEMS[name]
        found = document["systems"].setdefault(name, {"faults": {}, "load": {}})
        found["versions"] = kind(folder / f"{name}-versions", peers).versions()
        found["settings"] = kind.settings
        faults = given.faults.split(",")
        with ThreadPoolExecutor(given.at_once) as pool:
            verdicts = pool.map(partial(tried, name, peers=peers, folder=folder), faults)
            for fault, verdict in zip(faults, verdicts, strict=True):
                print(f"{name}\t{fault}\t{verdict}", flush=True)
                found["faults"][fault] = verdict
                found["load"][fault] = round(os.getloadavg()[0], 1)
        document["at"] = datetime.now(UTC).isoformat(timespec="minutes")
        if given.json:
            given.json.write_text(json.dumps(document, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    print(table(document["systems"]))


def table(found: dict[str, Any]) -> str:
    """Return the results as a Markdown table, systems down, faults across."""
    faults = list(FAULTS)
    lines = ["| system | " + " | ".join(faults) + " |", "| --- " * (len(faults) + 1) + "|"]
    for name, one in found.items():
        row = [one["faults"].get(fault, "-") for fault in faults]
        lines.append(f"| {SYSTEMS[name].name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
