"""``stoker plan``: how many replicas, rollouts and tool slots a wish needs, by simulation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption
from stoker.cli.output import answers, counted, remarks, table, write_json
from stoker.cli.text import cell
from stoker.errors import BadInput

if TYPE_CHECKING:
    from stoker.testing.simulator.planning import Plan

_BOUNDS_MAX = 2


def plan(
    *,
    profile: Annotated[
        Path, typer.Option("--profile", metavar="FILE", help="One replica: a sim: profile.")
    ],
    rollouts: Annotated[int, typer.Option("--rollouts", min=1, help="How many are wanted.")],
    hours: Annotated[
        float | None, typer.Option("--hours", min=0.01, help="In how long; else the profile's.")
    ] = None,
    tool_seconds: Annotated[
        str, typer.Option("--tool-seconds", metavar="P50,P99", help="How long tools take.")
    ] = "1,60",
    tool_timeout: Annotated[
        float, typer.Option("--tool-timeout", min=0.001, help="Seconds; longer ones are cut.")
    ] = 60.0,
    turns: Annotated[
        str, typer.Option("--turns", metavar="LOW,HIGH", help="Turns of a rollout.")
    ] = "8,20",
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="LOW,HIGH", help="Tokens of its first prompt.")
    ] = "1000,4000",
    sampled: Annotated[
        str, typer.Option("--sampled", metavar="LOW,HIGH", help="Tokens of a turn.")
    ] = "200,500",
    observed: Annotated[
        str, typer.Option("--observed", metavar="LOW,HIGH", help="Tokens a tool answers.")
    ] = "200,2000",
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="Simulated; longer is more exact.")
    ] = 1600.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """How many replicas, active rollouts and tool slots a wish needs.

    One replica runs in the simulator, with the scheduler and admission of a
    real run, until it is steady; the rest is multiplied. Sizes are drawn evenly
    between their bounds, tools from a log-normal with the given median and 99th
    percentile, cut at the timeout. What is not modelled stands under the answer:
    a real run has box boots, faults, queues for tools, weight updates, a ramp
    and a tail.

    Examples:
      stoker plan --profile h100.toml --rollouts 100000 --hours 12
      stoker plan --profile h100.toml --rollouts 5000 --tool-seconds 0.4,90 --json

    Exit codes:
      0    planned
      1    the simulation broke
      2    the profile or an option cannot be used
      130  interrupted
    """
    from stoker.inference.profile import load_profile
    from stoker.testing.simulator import planning
    from stoker.testing.simulator.trace import Shape, lognormal

    median, p99 = _numbers("--tool-seconds", tool_seconds, pair=True)
    if p99 <= median:
        raise BadInput(f"--tool-seconds {tool_seconds}: the 99th percentile is above the median")
    shape = Shape(
        prompt=_bounds("--prompt", prompt),
        turns=_bounds("--turns", turns),
        sampled=_bounds("--sampled", sampled),
        observed=_bounds("--observed", observed),
    )
    wish = planning.Wish(
        profile=load_profile(profile),
        shape=shape,
        waits=lognormal(median=median, p99=p99, cut=tool_timeout),
        rollouts=rollouts,
        hours=hours,
        seconds=seconds,
        seed=seed,
    )
    remarks().print(f"simulating {seconds:g} s of one replica …")
    found = planning.plan(wish)
    if as_json:
        write_json(found)
    else:
        _show(found)


def _bounds(option: str, given: str) -> tuple[int, int]:
    """Return whole LOW and HIGH, each at least 1; one number is both."""
    low, high = _numbers(option, given, pair=False)
    if low != int(low) or high != int(high) or low > high:
        raise BadInput(f"{option} {given}: LOW,HIGH are whole numbers, LOW no more than HIGH")
    return int(low), int(high)


def _numbers(option: str, given: str, *, pair: bool) -> tuple[float, float]:
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if not pair and len(numbers) == 1:
        numbers *= 2
    if len(numbers) != _BOUNDS_MAX or not all(0 < one < float("inf") for one in numbers):
        raise BadInput(f"{option} {given!r}: two numbers above 0 with a comma between")
    return numbers[0], numbers[1]


def _show(found: "Plan") -> None:
    made = table("what", ">value")
    rows = {
        "replicas": f"{found.replicas}",
        "hours": f"{found.hours:.2f} and the last rollouts: p95 {found.rollout_seconds_p95:.0f} s",
        "rollouts an hour": f"{found.rollouts_per_hour:,.0f}",
        "tokens a second": f"{found.tokens_per_second:,.0f}",
        "active rollouts": f"{found.active_rollouts:,}",
        "tool slots, mean / p99": f"{found.tool_slots_mean:,} / {found.tool_slots_p99:,}",
        "active share": f"{found.active_share:.1%}",
        "throughput of the bound": f"{found.throughput_share:.1%}",
        "batch occupancy": f"{found.occupancy:.1%}",
        "held for KV": f"{found.kv_held_share:.1%}",
        **{f"idle: {cause}": f"{share:.1%}" for cause, share in found.idle_share.items()},
    }
    for name, value in rows.items():
        made.add_row(cell(name), cell(value))
    console = answers()
    console.print(made)
    console.print(
        cell(f"simulated: {counted(found.simulated_rollouts, 'rollout')} that ended", "dim")
    )
    console.print(cell(f"not modelled: {', '.join(found.not_modelled)}", "dim"))
