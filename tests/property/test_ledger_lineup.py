"""Queues in memory hand out what the store would, or say that they do not know."""

from hypothesis import given
from hypothesis import strategies as st

from stoker.broker.lineup import Lineup
from stoker.broker.rows import Queue, Row
from stoker.model.action import ActionState
from stoker.model.ids import RunId
from support.ledger import RUN, action

LINES = (RUN, RunId("run_2"))
moves = st.lists(
    st.tuples(st.sampled_from("ad"), st.sampled_from(LINES), st.integers(0, 3), st.booleans()),
    max_size=40,
)


def row(run: RunId, order: int, priority: int) -> Row:
    return Row(
        order=order,
        action=action(order, run_id=run, priority=priority),
        digest="",
        partition="0",
        state=ActionState.ACCEPTED,
        accepted_boot=0.0,
        accepted_wall=0.0,
        deadline_boot=1.0,
        deadline_wall=1.0,
        due_boot=1.0,
    )


@given(moves)
def test_the_head_of_a_line_is_that_of_the_store_or_unknown(
    moves: list[tuple[str, RunId, int, bool]],
) -> None:
    lineup = Lineup()
    stored: dict[RunId, list[Row]] = {run: [] for run in LINES}
    for order, (move, run, number, behind_its_back) in enumerate(moves):
        line = stored[run]
        if move == "a":
            joins = row(run, order, priority=number)
            if not behind_its_back:  # else as after a reopening: the store has it, memory has not
                lineup.add(joins, len(line))
            line.append(joins)
        elif line:
            leaves = line.pop(number % len(line))
            lineup.discard(leaves)
        queue = Queue("fast", run, None, suspect=False)
        head = lineup.head(queue, 2, len(line))
        if head is not None:
            assert head == sorted(line, key=lambda r: (-r.action.priority, r.order))[:2]
        elif not line:
            raise AssertionError("an empty line is always known")
