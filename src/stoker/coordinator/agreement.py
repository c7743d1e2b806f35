"""What fixes a run, made of what was given; what differs from its record when given again."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

import stoker
from stoker.config.tree import Settings
from stoker.coordinator.record import RunRecord, changed_settings, require_same_tasks
from stoker.coordinator.request import RunRequest
from stoker.errors import BadInput, RunChanged
from stoker.inference.base import Model
from stoker.model.ids import RunId
from stoker.model.task import Task
from stoker.model.value import canonical_digest, content_digest
from stoker.rollout.messages import Loaded

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
        partitions=msgspec.UNSET if request.partition.is_whole else request.partition.count,
    )


def require_usable(request: RunRequest) -> None:
    """Check which run is asked for, before anything is looked for.

    Raises:
        BadInput: it is named twice, its name cannot be a directory's, or a part of a run without a
            name was asked for.
    """
    if request.run_id is not None and request.resume is not None:
        raise BadInput("--resume and --run-id both name the run; nothing was started; give one")
    if request.run_id is not None and not _RUN_ID.fullmatch(request.run_id):
        raise BadInput(
            f"{request.run_id!r} cannot be the id of a run; nothing was started; use letters, "
            "digits, dots, dashes and underscores, a letter or digit first, 64 at most"
        )
    if request.run_id is None and request.resume is None and not request.partition.is_whole:
        raise BadInput(
            f"partition {request.partition} of which run? Nothing was started; give all its "
            "coordinators one name with --run-id RUN (RunRequest.run_id)"
        )


def require_same_run(request: RunRequest, record: RunRecord) -> None:
    """Check what nothing can bridge: the tasks, and into how many parts they are divided.

    Raises:
        RunChanged: the record says otherwise.
    """
    require_same_tasks(request.tasks, record)
    count = record.partition_count
    if count != request.partition.count:
        name = f"one with --partition 0/{count}" if count > 1 else "none"
        raise RunChanged(
            f"run {record.run_id} was made with {count} partition{'s' * (count > 1)}, not with "
            f"{request.partition.count}; nothing was changed; name {name}"
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
        changed = changed_settings(_fixed(_completed(old.settings)), _fixed(new.settings))
        found += [f"setting {said}" for said in changed]
    return found


def _completed(tree: dict[str, Any]) -> dict[str, Any]:
    """Return recorded settings with what was added since at its default: that changes nothing."""
    try:
        return Settings.model_validate(tree).model_dump(mode="json")
    except ValidationError:  # of a version that knew others
        return tree


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
