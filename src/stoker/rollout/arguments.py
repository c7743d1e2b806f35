"""The argument and result records of every context verb, as they are digested and journalled.

Verb → arguments → result:

- ``generate`` → ``model.generation.GenerateArguments`` → ``Generation``
- ``environment`` → ``EnvironmentArguments`` → ``model.tools.OpenResult``
- ``run`` · ``write`` · ``read`` · ``export`` → ``BoxArguments`` → ``RunResult`` · ``None`` ·
  ``ReadResult`` · ``ExportResult``
- ``score`` → ``BoxArguments`` (request = ``ScoreRequest``) → ``Verdict``
- ``checkpoint`` → ``BoxArguments`` (request = ``CheckpointRequest``) → ``model.checkpoint``
- ``call`` → ``CallArguments`` → ``model.tools.CallResult``
- ``local`` → ``LocalArguments`` → any JSON value
- ``sleep`` · ``timer`` → ``TimerArguments`` → ``None``
- ``branch`` → ``BranchArguments`` → which of the branches it is, from 0
"""

from typing import Any

import msgspec

from stoker.model.action import Effect
from stoker.model.checkpoint import Checkpoint
from stoker.model.events import Verb
from stoker.model.generation import GenerateArguments
from stoker.model.ids import CallPath
from stoker.model.tools import (
    CallRequest,
    CheckpointRequest,
    ExportRequest,
    ReadRequest,
    RunRequest,
    ScoreRequest,
    WriteRequest,
)


class BranchedOff(msgspec.Struct, frozen=True, kw_only=True):
    """Where the branch of an environment begins."""

    environment: CallPath
    """Path of the ``environment`` call that opened the one it is branched off."""
    checkpoint: Checkpoint


class EnvironmentArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Open an environment."""

    baseline: str
    """Name of a baseline in the configuration."""
    worker_class: str | None
    """``None``: the configuration's default class for environments."""
    files: dict[str, bytes] = {}
    begins: BranchedOff | msgspec.UnsetType = msgspec.UNSET
    """Unset: at the baseline, with ``files``."""


class BoxArguments(msgspec.Struct, frozen=True, kw_only=True):
    """An action in an environment."""

    environment: CallPath
    """Path of the ``environment`` call that opened it."""
    request: bytes
    """Canonical msgpack of the request record in ``model.tools``."""
    timeout_seconds: float | None
    """``None``: the class's default."""
    replayable: bool = True
    """May be run again to rebuild the environment."""


class OnTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """What a timed-out call becomes: ``observe``, ``retry`` (with ``times``) or ``truncate``."""

    kind: str = "observe"
    times: int = 0


class CallArguments(msgspec.Struct, frozen=True, kw_only=True):
    """A stateless tool."""

    request: CallRequest
    effect: Effect
    worker_class: str | None
    timeout_seconds: float | None
    on_timeout: OnTimeout = OnTimeout()


class LocalArguments(msgspec.Struct, frozen=True, kw_only=True):
    """A function run in the host, off its loop."""

    function: str
    """Qualified name."""
    arguments: tuple[Any, ...] = ()


class TimerArguments(msgspec.Struct, frozen=True, kw_only=True):
    """A pause or a timeout."""

    seconds: float


class BranchArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Branch the rollout."""

    count: int
    """How many go on, whoever asks included."""


_RECORDS: dict[Verb, Any] = {
    Verb.GENERATE: GenerateArguments,
    Verb.ENVIRONMENT: EnvironmentArguments,
    Verb.RUN: BoxArguments,
    Verb.WRITE: BoxArguments,
    Verb.READ: BoxArguments,
    Verb.EXPORT: BoxArguments,
    Verb.SCORE: BoxArguments,
    Verb.CHECKPOINT: BoxArguments,
    Verb.CALL: CallArguments,
    Verb.LOCAL: LocalArguments,
    Verb.SLEEP: TimerArguments,
    Verb.TIMER: TimerArguments,
    Verb.BRANCH: BranchArguments,
}
_REQUESTS: dict[Verb, Any] = {
    Verb.RUN: RunRequest,
    Verb.WRITE: WriteRequest,
    Verb.READ: ReadRequest,
    Verb.EXPORT: ExportRequest,
    Verb.SCORE: ScoreRequest,
    Verb.CHECKPOINT: CheckpointRequest,
}
_argument_decoders = {verb: msgspec.msgpack.Decoder(kind) for verb, kind in _RECORDS.items()}
_request_decoders = {verb: msgspec.msgpack.Decoder(kind) for verb, kind in _REQUESTS.items()}


def decode_arguments(verb: Verb, encoded: bytes) -> tuple[Any, Any]:
    """Return the argument record of ``verb``, and for actions in an environment their request.

    Raises:
        msgspec.ValidationError: a field has a value of the wrong type.
    """
    arguments = _argument_decoders[verb].decode(encoded)
    decoder = _request_decoders.get(verb)
    return arguments, None if decoder is None else decoder.decode(arguments.request)
