from stoker.broker import recent
from stoker.broker.base import LedgerLimits
from stoker.broker.recent import KEPT_MAX, ROW_BYTES_MAX, Recent
from stoker.broker.rows import Row
from stoker.model.action import Action, ActionState
from stoker.model.ids import ActionId, CallPath, RolloutId, RunId
from stoker.model.value import inline_value


def row(number: int, *, size: int = 10, state: ActionState = ActionState.COMPLETED) -> Row:
    action = Action(
        action_id=ActionId(f"act_{number}"),
        run_id=RunId("run_1"),
        rollout_id=RolloutId("rol_1"),
        path=CallPath(str(number)),
        step=0,
        worker_class="fast",
        tool="call",
        input=inline_value(b"x" * size),
        timeout_seconds=1.0,
        deadline_seconds=LedgerLimits().lease_seconds,
    )
    return Row(
        order=number,
        action=action,
        digest="",
        partition="0",
        state=state,
        accepted_boot=0.0,
        accepted_wall=0.0,
        deadline_boot=1.0,
        deadline_wall=1.0,
        due_boot=1.0,
    )


def keep(kept: Recent, *rows: Row) -> None:
    """Let a group touch these rows and commit."""
    for one in rows:
        kept.keep(one)
    kept.trim()


def test_only_so_many_rows_are_kept_and_the_oldest_go_first() -> None:
    kept = Recent()
    keep(kept, *(row(number) for number in range(KEPT_MAX + 5)))
    assert len(kept.rows) == KEPT_MAX
    assert ActionId("act_4") not in kept.rows
    assert ActionId("act_5") in kept.rows
    keep(kept, row(5))  # used again: now the newest
    keep(kept, *(row(number) for number in range(10_000, 10_000 + KEPT_MAX - 1)))
    assert ActionId("act_5") in kept.rows


def test_large_and_acknowledged_rows_are_kept_for_their_group_only() -> None:
    kept = Recent()
    for one in (large := row(1, size=ROW_BYTES_MAX + 1), row(2, state=ActionState.ACKNOWLEDGED)):
        kept.keep(one)
    kept.keep(row(3))
    assert len(kept.rows) == 3
    assert kept.rows[ActionId("act_1")] is large, "the open group sees all that it has touched"
    kept.trim()
    assert set(kept.rows) == {ActionId("act_3")}
    keep(kept, row(3, state=ActionState.ACKNOWLEDGED))
    assert not kept.rows, "an acknowledged row is forgotten, not kept as it was"


def test_counts_and_journal_ends_are_bounded_too() -> None:
    kept = Recent()
    kept.outstanding.update((RolloutId(f"rol_{n}"), 1) for n in range(recent.KEPT_MAX * 2))
    kept.trim()
    assert len(kept.outstanding) == recent.KEPT_MAX
