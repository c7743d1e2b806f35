"""What fixes a run, made of what was given; what differs from its record when given again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stoker
from stoker.coordinator.record import RunRecord, changed_settings
from stoker.coordinator.request import RunRequest
from stoker.inference.base import Model
from stoker.model.ids import RunId
from stoker.model.task import Task
from stoker.model.value import canonical_digest, content_digest
from stoker.rollout.messages import Loaded

_PLACEMENT = frozenset({"count", "reserve_cores", "reserve_memory", "idle_exit"})
"""Worker settings that say where work runs, not how: they may differ on a resume."""


@dataclass(slots=True)
class Inputs:
    """What was read before anything is started."""

    tasks: tuple[Task, ...]
    tasks_bytes: bytes
    model: Model


def record_of(
    run_id: RunId, request: RunRequest, loaded: Loaded, inputs: Inputs, *, created: float
) -> RunRecord:
    """Return the record of a run made now (``created``, wall time) from what was given."""
    tree = request.settings.model_dump(mode="json")
    return RunRecord(
        run_id=run_id,
        stoker_version=stoker.__version__,
        created=created,
        program=str(request.program.resolve()),
        program_name=loaded.name,
        program_version=loaded.version,
        program_digest=loaded.source_digest,
        model=_model_identity(request.model, inputs.model),
        model_digest=_model_digest(request.model),
        tasks_digest=content_digest(inputs.tasks_bytes),
        tasks_count=len(inputs.tasks),
        settings=tree,
        settings_digest=canonical_digest(_fixed(tree)),
    )


def differences(old: RunRecord, new: RunRecord) -> list[str]:
    """Name what differs between two records and must not, both sides shown."""
    found = []
    for label, field in (
        ("program", "program_digest"),
        ("program name", "program_name"),
        ("model", "model"),
        ("model file", "model_digest"),
        ("task file", "tasks_digest"),
    ):
        before, now = getattr(old, field), getattr(new, field)
        if before != now:
            cut = 16 if field.endswith("digest") else None
            found.append(f"{label} (recorded {before[:cut]}, given {now[:cut]})")
    if old.settings_digest != new.settings_digest:
        changed = changed_settings(_fixed(old.settings), _fixed(new.settings))
        found += [f"setting {said}" for said in changed] or ["set of settings"]
    return found


def _fixed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a resume must agree with."""
    fixed = {key: tree[key] for key in ("run", "workers", "sandbox")}
    workers = {key: value for key, value in tree["workers"].items() if key not in _PLACEMENT}
    return {**fixed, "workers": workers}


def _model_identity(spec: str, model: Model) -> str:
    """Return what must be the same on a resume: of model servers the name, not the address."""
    return model.info().name if spec.startswith(("http:", "https:")) else spec


def _model_digest(spec: str) -> str:
    path = Path(spec.partition(":")[2])
    return content_digest(path.read_bytes()) if path.is_file() else ""
