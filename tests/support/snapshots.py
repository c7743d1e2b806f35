"""A run snapshot in mid-flight, with something of everything, for tests that show one."""

from stoker.coordinator.view import CapsView, ClassView, LaneView, RunSnapshot

LANE = LaneView(
    model="sim:a100", simulated=True, replicas=1, window=32, running=30, ready=12,
    active_share=0.974, throughput_share=0.881, occupancy=0.912, idle_while_ready_share=0.0012,
    calls=410, tokens=51200, retries=2,
)  # fmt: skip

FAST = ClassView(
    queued=3, parked=7, running=2, slots=2, oldest_queued_seconds=1.2, finished=120, busy_share=0.98
)
TESTS = ClassView(
    queued=0, running=0, slots=0, oldest_queued_seconds=0.0, finished=0, busy_share=0.0
)

SNAPSHOT = RunSnapshot(
    run_id="run_0a1b2c3d4e5f", run_directory="runs/run_0a1b2c3d4e5f", state="running",
    seconds=75.25, tasks_total=164, rollouts_total=164, rollouts_active=32, admission_target=40,
    outcomes={"completed": 98, "failed": 2, "truncated": 20}, reward_mean=0.8125, lane=LANE,
    classes={"fast": FAST, "tests": TESTS}, latency_ms_p50=12.0, latency_ms_p99=1400.0,
    actions=260, retries=3, faults={"box_failed": 2}, boxes_alive=4, boxes_leaked=0,
    isolation={"fast": "namespace (rung a)"}, accept_shared_kernel=True,
    caps=CapsView(
        queued=5, queued_max=100_000, unacknowledged=1, results_max=10_000, parked=7, other_runs=1
    ),
    recent=(
        "HumanEval/7 · completed 1 · 2 steps, 1 action · 1.2 s",
        "HumanEval/8 · failed (box_failed) · 1 step, 1 action, 2 retries · 3.4 s",
        "\x1b[2Jevil [red]markup[/red] \u202e" + "x" * 300,
    ),
)  # fmt: skip
