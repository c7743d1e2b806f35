"""From a context verb to an action: class, limits, deadlines, identity.

Pure but for the artifact store: the same call gives the same action id after any crash (I7).
Retries and restorations add a suffix to the path (``3.1~r1``, ``3.1~g1``), so that each is an
action of its own and all of them can be found from the call.
"""

from dataclasses import dataclass

import msgspec

from stoker.config.boxes import BaselineSettings
from stoker.config.classes import WorkerClassSettings
from stoker.config.tree import Settings
from stoker.coordinator.calls import Call
from stoker.coordinator.environments import Environment, opened
from stoker.coordinator.rollouts import ActiveRollout
from stoker.errors import ConfigInvalid, InternalError
from stoker.journal.artifacts import ArtifactStore
from stoker.model.action import Action, Effect
from stoker.model.events import Verb
from stoker.model.execution import Baseline, BaselineBuild
from stoker.model.ids import CallPath, WorkerId, action_id
from stoker.model.tools import OpenRequest
from stoker.model.value import canonical_bytes
from stoker.rollout.arguments import BoxArguments, CallArguments, EnvironmentArguments

OPENING_TOOL = "environment.open"
CLOSING_TOOL = "environment.close"
TOOLS = {
    Verb.ENVIRONMENT: OPENING_TOOL,
    Verb.RUN: "box.run",
    Verb.WRITE: "box.write_files",
    Verb.READ: "box.read_file",
    Verb.EXPORT: "box.export",
    Verb.SCORE: "score",
    Verb.CHECKPOINT: "box.checkpoint",
    Verb.CALL: "call",
}
"""Verbs that become actions."""
BOX_VERBS = frozenset({Verb.RUN, Verb.WRITE, Verb.READ, Verb.EXPORT, Verb.SCORE, Verb.CHECKPOINT})
"""Verbs that act in an environment."""
CHANGING_VERBS = frozenset({Verb.RUN, Verb.WRITE})
"""Verbs whose effect a rebuild must repeat."""
BASELINE_DEFAULT = "python"
"""What a program asks for when it names none; a class may say what that is."""
_CLOSE_SECONDS = 60.0


def baseline_of(name: str, settings: BaselineSettings) -> Baseline:
    """Return the baseline that ``settings`` describe."""
    build: BaselineBuild | msgspec.UnsetType = msgspec.UNSET
    if settings.files or settings.setup:
        build = BaselineBuild(
            files=settings.files, setup=settings.setup, timeout_seconds=settings.setup_timeout
        )
    return Baseline(
        name=name,
        environment=settings.environment,
        build=build,
        root=settings.root or msgspec.UNSET,
        packages=settings.packages or msgspec.UNSET,
    )


def environment_path(call: Call) -> CallPath | None:
    """Return which environment ``call`` acts in, if any."""
    if call.verb not in BOX_VERBS:
        return None
    return msgspec.msgpack.decode(call.arguments, type=BoxArguments).environment


def parked(rollout: ActiveRollout, call: Call) -> bool:
    """Let ``call`` wait for the end of the rebuild of its environment; ``False``: there is none.

    An action that went out meanwhile would run in a half-built life, perhaps the bare baseline.
    """
    rebuilt = [one for one in rollout.environments.values() if one.restoration is not None]
    path = environment_path(call) if rebuilt else None
    for environment in rebuilt:
        if environment.path == path and environment.restoration is not None:
            environment.restoration.parked.append(call)
            return True
    return False


@dataclass(slots=True, frozen=True)
class _Shape:
    """What differs between verbs."""

    worker_class: str
    effect: Effect
    input: bytes
    timeout_seconds: float
    environment: Environment | None


class ActionFactory:
    """Builds actions under one run's settings."""

    def __init__(self, settings: Settings, artifacts: ArtifactStore) -> None:
        self._settings = settings
        self._artifacts = artifacts

    def build(self, rollout: ActiveRollout, call: Call, suffix: str, left_seconds: float) -> Action:
        """Return the action that stands for ``call``; ``left_seconds`` remain of its rollout.

        Raises:
            ConfigInvalid: the program names a class or baseline that is not configured.
        """
        shape = self._shape(rollout, call)
        settings = self.worker_class(shape.worker_class)
        path = CallPath(call.path + suffix)
        environment = shape.environment
        return Action(
            action_id=action_id(rollout.rollout_id, path),
            run_id=rollout.admitted.run_id,
            rollout_id=rollout.rollout_id,
            path=path,
            step=max(0, rollout.history.calls - 1),
            worker_class=shape.worker_class,
            tool=TOOLS[call.verb],
            input=self._artifacts.put(shape.input),
            effect=shape.effect,
            timeout_seconds=min(shape.timeout_seconds, left_seconds),
            deadline_seconds=min(settings.deadline, left_seconds),
            environment_id=environment.environment_id if environment else None,
            generation=environment.generation if environment else 0,
            holder=environment.holder if environment and call.verb in BOX_VERBS else None,
            attempts_max=settings.attempts,
            policy_digest=self._policy_digest(settings),
        )

    def close(self, rollout: ActiveRollout, environment: Environment) -> Action:
        """Return the action that lets go of ``environment``."""
        settings = self.worker_class(environment.worker_class)
        path = CallPath(f"{environment.path}~close{environment.generation}")
        return Action(
            action_id=action_id(rollout.rollout_id, path),
            run_id=rollout.admitted.run_id,
            rollout_id=rollout.rollout_id,
            path=path,
            step=max(0, rollout.history.calls - 1),
            worker_class=environment.worker_class,
            tool=CLOSING_TOOL,
            input=self._artifacts.put(b""),
            effect=Effect.CONTAINED,
            priority=1,
            timeout_seconds=_CLOSE_SECONDS,
            deadline_seconds=_CLOSE_SECONDS,
            environment_id=environment.environment_id,
            generation=environment.generation,
            holder=environment.holder,
            policy_digest=self._policy_digest(settings),
        )

    def close_opened(self, opened: Action, holder: WorkerId) -> Action:
        """Return the action that lets go of what ``opened`` opened at ``holder``."""
        call = opened.path.partition("~")[0]
        path = CallPath(f"{call}~close{opened.generation}")
        return msgspec.structs.replace(
            opened,
            action_id=action_id(opened.rollout_id, path),
            path=path,
            tool=CLOSING_TOOL,
            input=self._artifacts.put(b""),
            priority=1,
            timeout_seconds=_CLOSE_SECONDS,
            deadline_seconds=_CLOSE_SECONDS,
            holder=holder,
        )

    def environment(self, rollout: ActiveRollout, call: Call) -> Environment:
        """Return the record of the environment that ``call`` opens."""
        return opened(rollout.rollout_id, call, self._settings.workers)

    def worker_class(self, name: str) -> WorkerClassSettings:
        """Return the settings of a class.

        Raises:
            ConfigInvalid: there is no such class.
        """
        found = self._settings.workers.classes.get(name)
        if found is None:
            raise ConfigInvalid(
                f"the program asks for worker class {name!r}; configured are "
                f"{sorted(self._settings.workers.classes)}; add [workers.classes.{name}]"
            )
        return found

    def _policy_digest(self, settings: WorkerClassSettings) -> str:
        shared = self._settings.sandbox.accept_shared_kernel
        return settings.policy(accept_shared_kernel=shared).digest()

    def _shape(self, rollout: ActiveRollout, call: Call) -> _Shape:
        if call.verb is Verb.ENVIRONMENT:
            return self._opening(rollout, call)
        if call.verb is Verb.CALL:
            return self._stateless(call)
        if call.verb in BOX_VERBS:
            return self._in_environment(rollout, call)
        raise InternalError(f"{call.verb} does not become an action")

    def _opening(self, rollout: ActiveRollout, call: Call) -> _Shape:
        arguments = msgspec.msgpack.decode(call.arguments, type=EnvironmentArguments)
        environment = rollout.environments[call.path]
        settings = self.worker_class(environment.worker_class)
        name = arguments.baseline
        if name == BASELINE_DEFAULT and settings.baseline is not None:
            name = settings.baseline
        baseline = self._settings.sandbox.baseline(name)
        if baseline is None:
            raise ConfigInvalid(
                f"the program asks for baseline {name!r}; configured are "
                f"{sorted(self._settings.sandbox.baselines)} (one of a directory of roots is asked "
                "for as NAME/ONE)"
            )
        if settings.by_ticket:
            raise ConfigInvalid(
                f"the program asks for an environment of class {environment.worker_class!r}, which "
                "is by_ticket: an environment belongs to one worker, so no other queue can hand "
                "its actions out; name another class"
            )
        request = OpenRequest(
            baseline=baseline_of(name, baseline),
            policy=settings.policy(
                accept_shared_kernel=self._settings.sandbox.accept_shared_kernel
            ),
            files=arguments.files if environment.saved is None else {},
            checkpoint=msgspec.UNSET if environment.saved is None else environment.saved,
        )
        return _Shape(
            environment.worker_class,
            Effect.CONTAINED,
            canonical_bytes(request),
            settings.timeout,
            environment,
        )

    def _in_environment(self, rollout: ActiveRollout, call: Call) -> _Shape:
        arguments = msgspec.msgpack.decode(call.arguments, type=BoxArguments)
        environment = rollout.environments[arguments.environment]
        settings = self.worker_class(environment.worker_class)
        return _Shape(
            environment.worker_class,
            Effect.CONTAINED,
            arguments.request,
            arguments.timeout_seconds or settings.timeout,
            environment,
        )

    def _stateless(self, call: Call) -> _Shape:
        arguments = msgspec.msgpack.decode(call.arguments, type=CallArguments)
        name = arguments.worker_class or self._settings.workers.call_class
        settings = self.worker_class(name)
        return _Shape(
            name,
            arguments.effect,
            canonical_bytes(arguments.request),
            arguments.timeout_seconds or settings.timeout,
            None,
        )
