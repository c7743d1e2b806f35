"""One system's rate of whole round trips, as one JSON line.

``.venv-peers/bin/python -m bench_peers NAME FOLDER [--seconds 3] [--set K=V …]``. A round trip is
submit → run an empty function → result seen by who submitted → removed, 1 KiB each way. ``--set``
tries other settings than the best we found; ``SETTINGS`` of each module names them.
Exit code 3: it is not installed, and the line says what is missing.
"""

import argparse
import importlib
import json
import sys
from importlib import metadata
from pathlib import Path

from bench_peers.meter import Meter

NOT_INSTALLED = 3
NAMES = ("taskiq", "dramatiq", "procrastinate", "ray")


def main() -> int:
    """Measure one system; print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--outstanding", type=int, default=256)
    parser.add_argument("--set", nargs="*", default=[], metavar="K=V")
    given = parser.parse_args()
    try:
        peer = importlib.import_module(f"bench_peers.{given.name}_peer")
    except ImportError as error:
        print(json.dumps({"missing": str(error)}))
        return NOT_INSTALLED
    settings = dict(peer.SETTINGS)
    for one in given.set:
        key, _, value = one.partition("=")
        settings[key] = type(settings[key])(value)
    meter = Meter(given.seconds)
    peer.work(given.folder, meter, given.outstanding, settings)
    versions = [f"{package} {metadata.version(package)}" for package in peer.PACKAGES]
    said = [f"{key} {value}" for key, value in settings.items()]
    found = {"cycles": meter.cycles, "seconds": meter.seconds}
    found |= {"versions": ", ".join(versions), "settings": ", ".join([peer.DURABILITY, *said])}
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
