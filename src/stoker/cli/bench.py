"""``stoker bench NAME``: measure this machine against the promised figures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.cli.options import JsonOption
from stoker.cli.output import answers, remarks, table, write_json
from stoker.cli.text import cell
from stoker.model.execution import Isolation

app = typer.Typer(no_args_is_help=True)


@app.callback()
def benches() -> None:
    """Benches: measured figures beside their goals.

    Each measures this machine, against a peer in the same run where there is one,
    and says under which load it did. A figure that cannot be measured here is
    left out with a note, never guessed.

    Examples:
      stoker bench step
      stoker bench step --json
      stoker bench boxes
      stoker bench ledger
      stoker bench torch
      stoker bench lane
      stoker bench scale
      stoker bench soak --minutes 5
      stoker bench attacks

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """


@app.command("step")
def step(
    runs: Annotated[int, typer.Option("--repeat", min=1, help="How often to measure.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """What one step costs beyond its syncs: model returned to observation delivered.

    Runs a program of one tool call a step against a model that answers at once,
    on a ledger of its own in a directory that is removed afterwards.

    Examples:
      stoker bench step
      stoker bench step --repeat 5 --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_step import measure

    _answer(measure(runs=runs, say=remarks().print), as_json=as_json)


@app.command("boxes")
def boxes(
    runs: Annotated[int, typer.Option("--repeat", min=1, help="How often to measure.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """What a box costs here, and how exactly its limits hold.

    Makes boxes of the strongest isolation this host has for untrusted work,
    attacks their limits, kills a worker that holds thirty of them and sweeps
    what it left. About half a minute each time; nothing stays behind.

    Examples:
      stoker bench boxes
      stoker bench boxes --repeat 3 --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_boxes import measure

    _answer(measure(runs=runs, say=remarks().print), as_json=as_json)


@app.command("ledger")
def ledger(
    runs: Annotated[int, typer.Option("--repeat", min=1, help="Rounds to measure.")] = 5,
    queued: Annotated[
        int, typer.Option("--queued", min=0, help="Actions waiting in the deep queue.")
    ] = 1_000_000,
    postgres: Annotated[
        str | None,
        typer.Option("--postgres", help="Measure gateways to this server instead: its address."),
    ] = None,
    peers: Annotated[
        Path, typer.Option("--peers", help="Where make bench-peers put other queues.")
    ] = Path(".venv-peers"),
    as_json: JsonOption = False,
) -> None:
    """What a durable hand-off costs, beside an append-only log with the same rows.

    Whole cycles (append, lease, start, heartbeat, complete, event, acknowledge),
    power-safe, 1 KiB each way, 256 outstanding, and one; a cancel's way to its
    worker; idle slots; and a deep queue, with the owner killed on top of it.
    Other durable queues and Ray's actors do the same round trip in turn, where
    make bench-peers has installed them.
    With --postgres: one gateway and two, beside plain batched SQL, and churn, in
    schemas of their own that are dropped afterwards.

    Examples:
      stoker bench ledger
      stoker bench ledger --repeat 1 --queued 0
      stoker bench ledger --postgres postgresql://me@host/spare
      stoker bench ledger --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """
    if postgres is not None:
        from stoker.cli import bench_ledger_postgres
        from stoker.config.secret import Secret

        say = remarks().print
        document = bench_ledger_postgres.measure(Secret(postgres), runs=runs, say=say)
        _answer(document, as_json=as_json)
        return
    from stoker.cli.bench_ledger import measure

    _answer(measure(runs=runs, queued=queued, peers=peers, say=remarks().print), as_json=as_json)


@app.command("torch")
def in_process(
    runs: Annotated[int, typer.Option("--repeat", min=1, help="How often to measure.")] = 3,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="A model folder; else SmolLM2 from its wheel.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a step of an in-process model costs, and what batching is worth.

    Steps of 1, 8, 32 and 64 sequences, and the time for sequences of uneven and
    of equal lengths beside transformers' own generate with static batches.
    Minutes on two cores.

    Examples:
      stoker bench torch
      stoker bench torch --repeat 5 --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    torch is not installed, or the folder cannot be used
      130  interrupted
    """
    from stoker.inference.in_process.folder import check_folder
    from stoker.inference.open import require_torch

    require_torch("torch:smollm2" if folder is None else f"torch:{folder}")
    if folder is not None:
        check_folder(folder, tokenizer=False)
    from stoker.cli.bench_torch import bench

    _answer(bench(folder=folder, runs=runs, say=remarks().print), as_json=as_json)


@app.command("lane")
def lane(
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=90, help="Paired seeds of each regime.")
    ] = 10,
    seconds: Annotated[
        float, typer.Option("--seconds", min=400, help="Virtual seconds of a stationary run.")
    ] = 1600.0,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Simulations at once.")] = 2,
    real: Annotated[
        bool, typer.Option("--real", help="Real runs too: beside a simulation, and of 10,000.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The lane and admission beside their peers, on a virtual clock.

    A closed batch against the ideal schedule and lock-step, a steady supply, and
    stationary regimes where the KV cache is short against a semaphore that was
    tuned to each, the same a quarter too big, and on work that shifts; beside
    other peers too, each at its tuned value and a quarter less and more. The
    figures are of policies: the same seeds give the same ones on any machine.
    Half an hour on two cores. With --real, a closed batch on the real clock
    with tools that sleep, and what bench scale measures, ten minutes more.

    Examples:
      stoker bench lane --seeds 2
      stoker bench lane --real
      stoker bench lane --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_lane import measure

    say = remarks().print
    document = measure(seeds=seeds, seconds=seconds, processes=processes, real=real, say=say)
    _answer(document, as_json=as_json)
    if not as_json:
        _tell_peers(document["peers"])


@app.command("scale")
def scale(
    rollouts: Annotated[
        int, typer.Option("--rollouts", min=101, help="How many at once, beside a hundred.")
    ] = 10_000,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long each crowd is watched.")
    ] = 60.0,
    runs: Annotated[int, typer.Option("--repeat", min=1, help="How often to measure.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """What ten thousand rollouts of one coordinator cost, beside a hundred.

    Real runs that make as many steps a second whatever their size: CPU time of a
    step, and memory of a rollout that waits; then as many histories of 16,000
    tokens at once. Some minutes, 3 GB of memory and 2 GB of disk, given back.

    Examples:
      stoker bench scale
      stoker bench scale --rollouts 1000 --seconds 10 --json

    Exit codes:
      0    measured, whether or not a goal was met
      1    the bench broke
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_scale import measure

    say = remarks().print
    document = measure(runs=runs, rollouts=rollouts, seconds=seconds, say=say)
    _answer(document, as_json=as_json)


@app.command("soak")
def soak(
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="How long to go on; a round is finished.")
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", help="Decides every blow and its moment.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Kill and stop every process of real runs for minutes; check what is left.

    Each round hurts one run (coordinator, workers, ledger owner, program hosts,
    all at once), lets it finish in calm and reads it from the disk: nothing
    lost, nothing counted twice at the tool, the right rewards from completed
    rollouts alone, journals that replay, no box left.

    Examples:
      stoker bench soak --minutes 1
      stoker bench soak --minutes 60 --seed 7 --json

    Exit codes:
      0    nothing was found
      1    something was: the findings and the seed are told
      2    the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_soak import measure

    document = measure(minutes=minutes, seed=seed, say=remarks().print)
    _answer(document, as_json=as_json)
    if document["findings"]:
        for finding in document["findings"]:
            remarks().print(cell(finding))
        raise typer.Exit(1)


@app.command("attacks")
def attacks(
    warm: Annotated[
        bool, typer.Option("--warm", help="In boxes whose interpreter waits in them.")
    ] = False,
    isolation: Annotated[
        Isolation, typer.Option("--isolation", help="Which boxes: namespace or container.")
    ] = Isolation.NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Attack boxes of this host: each attack without its defence, then in a box.

    Programs that want out of a box, more than their share, to live on after
    their action or a score they did not earn. One that does not succeed without
    its defence proves nothing and is not counted. Two minutes; bounded, and
    nothing stays behind.

    Examples:
      stoker bench attacks
      stoker bench attacks --warm --json
      stoker bench attacks --isolation container

    Exit codes:
      0    every attack was held
      1    some were not: they are told
      2    no such boxes on this host, or the command line cannot be used
      130  interrupted
    """
    from stoker.cli.bench_attacks import measure

    document = measure(warm=warm, isolation=isolation, say=remarks().print)
    _answer(document, as_json=as_json)
    for one in document["not_held"]:
        remarks().print(cell(f"not held: {one['name']} ({one['case']}): {one['seen']}"))
    if document["not_held"]:
        raise typer.Exit(1)


def _answer(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(document)
        return
    made = table("figure", ">value", "unit", ">goal", ">low", ">high", ">runs")
    for name, figure in document["figures"].items():
        values = [figure.get(key) for key in ("value", "unit", "target", "low", "high", "runs")]
        value, unit, *rest = ["-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)
                              for v in values]  # fmt: skip
        made.add_row(cell(name), value, cell(unit), *rest)
    console = answers()
    console.print(made)
    for note in sorted(set(document.get("notes", {}).values())):
        left_out = [name for name, why in document["notes"].items() if why == note]
        console.print(cell(f"left out: {', '.join(left_out)} ({note})", "dim"))
    console.print(cell(", ".join(f"{k} {v}" for k, v in document["machine"].items()), "dim"))


def _tell_peers(peers: dict[str, Any]) -> None:
    """Show each peer's tuned value in each regime, and ours ÷ its speed there and a quarter off."""
    made = table("regime", "peer", ">tuned to", ">x 0.75", ">x 1", ">x 1.25")
    for regime, each in peers.items():
        for name, one in each.items():
            ratios = [f"{ratio:.3f}" for ratio in one["ours_divided_by_it"].values()]
            made.add_row(cell(regime), cell(name), str(one["tuned_to"]), *ratios)
    answers().print(made)
