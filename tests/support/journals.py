"""One rollout's journal with something of everything, for tests that read one."""

from stoker.broker.base import RolloutSummary
from stoker.model.action import Effect
from stoker.model.events import (
    Admitted,
    Delivered,
    Finished,
    Issued,
    JournalEvent,
    Late,
    Recovered,
    Reissued,
    Restored,
    Tainted,
    Verb,
    Withdrawn,
    encode_event,
)
from stoker.model.faults import FaultRecord, FaultSide
from stoker.model.generation import (
    GenerateArguments,
    Generation,
    Message,
    Role,
    ToolCall,
    VersionSpan,
    pack_tokens,
)
from stoker.model.ids import ActionId, CallPath, GroupId, RolloutId, RunId, WorkerId
from stoker.model.outcome import Outcome, OutcomeKind
from stoker.model.task import Task
from stoker.model.tools import (
    CallRequest,
    CallResult,
    OpenResult,
    RunRequest,
    RunResult,
    ScoreRequest,
    Stream,
    Tests,
    Verdict,
)
from stoker.model.value import Value, canonical_bytes, inline_value
from stoker.rollout.arguments import BoxArguments, CallArguments, EnvironmentArguments

ROLLOUT = RolloutId("rol_0123456789abcdef0123")
LOST = FaultRecord(
    code="worker_lost", side=FaultSide.INFRASTRUCTURE, message="wrk_1 is gone", retryable=True
)


def value(record: object) -> Value:
    """Return ``record`` as it is journalled."""
    return inline_value(canonical_bytes(record))


def issued(path: str, verb: Verb, record: object, action: str | None = None) -> Issued:
    """Return the call of ``verb`` at ``path``."""
    return Issued(
        path=CallPath(path), verb=verb, digest="d", arguments=value(record),
        action_id=ActionId(action) if action else None,
    )  # fmt: skip


def box(request: object) -> BoxArguments:
    """Return the arguments of an action in the first environment."""
    return BoxArguments(
        environment=CallPath("0"), request=canonical_bytes(request), timeout_seconds=None
    )


ADMITTED = Admitted(
    run_id=RunId("run_1"), rollout_id=ROLLOUT, group_id=GroupId("grp_1"), index=0,
    task=Task(task_id="HumanEval/7", data={}), program="repair", program_version="1",
    program_digest="ab" * 32, python="3.11", hash_seed=0, epoch="e0", at=1000.0,
    timeout_seconds=1200.0,
)  # fmt: skip

BLOCK_CALL = ToolCall(
    call_id="c", name="run_python", arguments={"code": "1"},
    raw='{"name": "run_python", "arguments": {"code": "1"}}',
)  # fmt: skip

SAMPLED = Generation(
    text="Let me see.",
    token_ids=pack_tokens([1, 2, 3]),
    tool_calls=(BLOCK_CALL,),
    spans=(VersionSpan(4, 0, 3),),
)

OPENING: list[JournalEvent] = [
    ADMITTED,
    issued("0", Verb.ENVIRONMENT, EnvironmentArguments(baseline="python", worker_class=None,
           files={"a.py": b""}), "act_0"),
    Delivered(path=CallPath("0"), value=value(OpenResult(isolation="namespace", rung="a",
              baseline_digest="b")), at=1000.25, action_id=ActionId("act_0"), attempt=1,
              status="ok", queue_seconds=0.01, run_seconds=0.2, latency_seconds=0.25),
]  # fmt: skip

TURN: list[JournalEvent] = [
    issued("1", Verb.GENERATE, GenerateArguments(parent=None,
           suffix=(Message(role=Role.USER, content="Fix it."),))),
    Delivered(path=CallPath("1"), value=value(SAMPLED), at=1001.0, latency_seconds=0.75),
    issued("2", Verb.RUN, box(RunRequest(argv=("python", "-c", "1"))), "act_2"),
    Late(action_id=ActionId("act_2"), status="ok", disposition="discarded"),
    Restored(path=CallPath("0"), generation=1, worker_id=WorkerId("wrk_2"), reason="worker_lost"),
    Delivered(path=CallPath("2"), value=value(RunResult(exit_code=1,
              stdout=Stream(kept=b"\x1b[2Jboo [red]\xff", total_bytes=14))), at=1003.5,
              action_id=ActionId("act_2"), attempt=2, status="ok", queue_seconds=0.5,
              run_seconds=1.5, latency_seconds=2.5),
]  # fmt: skip

TROUBLE: list[JournalEvent] = [
    issued("3", Verb.CALL, CallArguments(request=CallRequest(function="fetch", arguments={"n": 1}),
           effect=Effect.EXTERNAL, worker_class=None, timeout_seconds=None), "act_3"),
    Reissued(path=CallPath("3")),
    Delivered(path=CallPath("3"), fault=LOST, at=1004.0, action_id=ActionId("act_3"), attempt=1,
              status="ambiguous", latency_seconds=0.5),
    Tainted(path=CallPath("3"), fault=LOST),
    Recovered(code="worker_lost"),
    issued("4", Verb.CALL, CallArguments(request=CallRequest(function="slow"), effect=Effect.PURE,
           worker_class=None, timeout_seconds=None), "act_4"),
    Withdrawn(path=CallPath("4")),
]  # fmt: skip

ENDING: list[JournalEvent] = [
    issued("5", Verb.SCORE, box(ScoreRequest(tests=Tests(source="", entry_point="f"))), "act_5"),
    Delivered(path=CallPath("5"), value=value(Verdict(passed=True)), at=1005.0,
              action_id=ActionId("act_5"), attempt=1, status="ok"),
    Finished(outcome=Outcome(kind=OutcomeKind.COMPLETED, reward=1.0), at=1005.5, steps=1,
             actions=4),
]  # fmt: skip

OUTSTANDING = issued(
    "6", Verb.CALL, CallArguments(request=CallRequest(argv=("make",)), effect=Effect.PURE,
    worker_class=None, timeout_seconds=None), "act_6",
)  # fmt: skip
CALLED = CallResult(value={"answer": 42})

WHOLE = [*OPENING, *TURN, *TROUBLE, *ENDING]
OPEN = [*OPENING, *TURN, OUTSTANDING]


def summary(events: list[JournalEvent]) -> RolloutSummary:
    """Return what the ledger says about a rollout with this journal."""
    last = events[-1]
    return RolloutSummary(
        rollout_id=ROLLOUT,
        seq=len(events),
        first=encode_event(events[0]),
        last=encode_event(last) if isinstance(last, Finished) else None,
    )
