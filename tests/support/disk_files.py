"""What a run keeps beside its ledger, written as production writes it: artifacts and the record.

Run under ``disk_recorder``; each promise leaves a mark. ``judge`` says what an image lacks.
"""

import random
import sys
from pathlib import Path

import msgspec

from stoker.coordinator.record import RunDirectory, RunRecord
from stoker.errors import RunNotFound
from stoker.journal.artifacts import ArtifactStore
from stoker.model.ids import RunId
from stoker.model.value import INLINE_BYTES_MAX, Value, content_digest
from support import disk_trace

COUNT = 6


def contents() -> list[bytes]:
    chance = random.Random(7)
    return [chance.randbytes(INLINE_BYTES_MAX + 1 + n * 1_000) for n in range(COUNT)]


def record(restarts: int) -> RunRecord:
    return RunRecord(
        run_id=RunId("run_1"),
        stoker_version="0",
        created=0.0,
        program="p.py",
        program_name="p",
        program_version="1",
        program_digest="",
        model="m",
        model_digest="",
        tasks_digest="",
        tasks_count=1,
        settings={},
        settings_digest="",
        restarts=restarts,
    )


def main() -> None:
    run = RunDirectory(Path(sys.argv[1]) / "runs" / "run_1")
    run.create()
    store = ArtifactStore(run.artifacts)
    for number, content in enumerate(contents()):
        store.put(content)
        disk_trace.mark(f"artifact {number}")
        run.write_record(record(number))
        disk_trace.mark(f"record {number}")


def judge(image: Path, marks: list[str]) -> str | None:
    """Return what is wrong with an image after these promises."""
    place = image / "runs" / "run_1"
    store = ArtifactStore(place / "artifacts")
    for number, content in enumerate(contents()):
        value = Value(digest=content_digest(content), size_bytes=len(content))
        path = place / "artifacts" / value.digest[:2] / value.digest[2:]
        if path.exists():
            if path.read_bytes() != content:
                return f"artifact {number} is half there under its own name"
        elif f"artifact {number}" in marks:
            return f"artifact {number} was promised and is gone"
        if f"artifact {number}" in marks:
            store.get(value)
    promised = [int(mark.split()[1]) for mark in marks if mark.startswith("record")]
    try:
        found = RunDirectory(place).record.restarts
    except (RunNotFound, msgspec.MsgspecError) as error:
        missing = not (place / "run.json").exists()
        return None if missing and not promised else f"the record cannot be read: {error}"
    return None if not promised or found >= promised[-1] else f"an older record: {found}"


if __name__ == "__main__":
    main()
