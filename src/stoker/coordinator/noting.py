"""What a result did to its environment, noted there: what a rebuild must repeat or begin from.

Noted once for each result: when its turn is journalled, or before if the box is lost meanwhile.
"""

from stoker.coordinator.actions import CHANGING_VERBS, environment_path
from stoker.coordinator.calls import Call
from stoker.coordinator.rollouts import ActiveRollout, Result
from stoker.journal.artifacts import ArtifactStore
from stoker.model.events import Verb


def note(rollout: ActiveRollout, call: Call, result: Result, artifacts: ArtifactStore) -> bool:
    """Note what ``result`` did; return whether it changed its environment."""
    completion, path = result.completion, environment_path(call)
    if completion is None or path is None:
        return False
    environment, known, result.noted = rollout.environments[path], result.noted, True
    if call.verb is Verb.CHECKPOINT and result.value is not None and not known:
        environment.keep(artifacts.get(result.value))
    if call.verb not in CHANGING_VERBS or not completion.attempt or completion.box_gone:
        return False
    call.status = completion.status
    if not known:
        environment.ran(call)
    return True


def note_waiting(rollout: ActiveRollout, artifacts: ArtifactStore) -> None:
    """Note results on their way to the program: what had ended was part of the box that is lost."""
    for result in (*((rollout.current,) if rollout.current else ()), *rollout.waiting):
        if (call := rollout.calls.get(result.path)) is not None:
            note(rollout, call, result, artifacts)
