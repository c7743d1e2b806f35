"""``stoker plan``: one replica simulated, and what a wish needs of them."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.cli.main import main
from stoker.errors import BadInput
from stoker.inference.profile import SimProfile
from stoker.testing.simulator.planning import Plan, Wish, plan
from stoker.testing.simulator.trace import Shape, constant, lognormal

PROFILE = SimProfile(policy="scripted:none", a=0.025, c=2e-3, window=8, name="few")
SHAPE = Shape(prompt=(100, 100), turns=(10, 10), sampled=(10, 10), observed=(20, 20))


def wish(**more: Any) -> Wish:
    fields = {"profile": PROFILE, "shape": SHAPE, "waits": constant(2.0), "rollouts": 10_000}
    return Wish(**{**fields, "seconds": 300.0, **more})


@pytest.fixture(scope="module")
def steady() -> Plan:
    return plan(wish())


def test_the_tool_slots_are_those_of_littles_law(steady: Plan) -> None:
    turns_per_second = 10 * steady.rollouts_per_hour / 3600
    assert steady.tool_slots_mean == pytest.approx(2.0 * turns_per_second, rel=0.05)
    assert steady.tool_slots_mean <= steady.tool_slots_p99 <= steady.active_rollouts
    seconds = steady.rollout_seconds_p50
    assert steady.active_rollouts == pytest.approx(seconds * turns_per_second / 10, rel=0.1)


def test_a_replica_is_kept_at_its_bound_and_the_rest_is_multiplied(steady: Plan) -> None:
    bound = PROFILE.window / (PROFILE.a + PROFILE.c * PROFILE.window)
    assert 0.95 * bound <= steady.tokens_per_second <= 1.001 * bound
    assert steady.active_share == pytest.approx(1, abs=0.01)
    assert steady.replicas == 1
    assert steady.hours == pytest.approx(1e4 / steady.rollouts_per_hour)
    in_time = plan(wish(hours=steady.hours / 3.5))
    assert in_time.replicas == 4
    assert in_time.hours == pytest.approx(steady.hours / 4)
    assert in_time.active_rollouts == pytest.approx(4 * steady.active_rollouts, abs=4)
    assert in_time.tool_slots_p99 < 4 * steady.tool_slots_p99 + 4, "spreads even out"


def test_a_kv_cache_that_is_short_costs_throughput_and_is_named() -> None:
    waits = lognormal(median=1.0, p99=20.0, cut=20.0)
    roomy, short = (
        plan(
            wish(
                waits=waits,
                seconds=120.0,
                profile=PROFILE.model_copy(update={"kv_tokens": tokens, "p": 1e-4}),
            )
        )
        for tokens in (100_000, 2_000)
    )
    assert short.rollouts_per_hour < roomy.rollouts_per_hour
    assert short.kv_held_share > roomy.kv_held_share
    assert short.active_rollouts < roomy.active_rollouts


def test_what_cannot_be_planned_is_one_sentence() -> None:
    with pytest.raises(
        BadInput, match="grows to 400 tokens and the KV cache of the profile has 300"
    ):
        plan(wish(profile=PROFILE.model_copy(update={"kv_tokens": 300})))
    with pytest.raises(BadInput, match="no rollout ended in 10 simulated seconds"):
        plan(wish(seconds=10.0))


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "few.toml"
    path.write_text('policy = "scripted:none"\na = "25ms"\nc = "2ms"\nwindow = 8\n')
    return path


def planned(profile: Path, *more: str) -> list[str]:
    sizes = ["--turns", "10", "--prompt", "100", "--sampled", "10", "--observed", "20"]
    wished = ["--rollouts", "10000", "--seconds", "200", "--tool-seconds", "1,10"]
    return ["plan", "--profile", str(profile), *wished, *sizes, *more]


def test_the_command_answers_in_words_and_in_json(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(planned(profile, "--hours", "0.1", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    found = msgspec.convert(said, Plan)
    assert found.replicas == math.ceil(1e5 / (found.rollouts_per_hour / found.replicas))
    assert "boots of boxes" in found.not_modelled
    assert main(planned(profile, "--hours", "0.1")) == 0
    words = capsys.readouterr().out
    assert re.search(rf"replicas\W+{found.replicas}\b", words)
    assert "not modelled: boots of boxes" in words


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--turns", "9,3"), "--turns 9,3: LOW,HIGH are whole numbers, LOW no more than HIGH"),
        (("--prompt", "1.5"), "--prompt 1.5: LOW,HIGH are whole numbers"),
        (("--sampled", "0,4"), "--sampled '0,4': two numbers above 0"),
        (("--observed", "few"), "--observed 'few': two numbers above 0"),
        (("--tool-seconds", "9,3"), "the 99th percentile is above the median"),
        (("--profile", "none.toml"), "cannot be read"),
    ],
)
def test_bad_options_are_named(
    profile: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], says: str
) -> None:
    assert main(planned(profile, *more)) == 2
    assert says in " ".join(capsys.readouterr().err.split())
