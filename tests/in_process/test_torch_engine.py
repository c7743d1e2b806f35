"""Continuous batching, counted step by step on a tiny model with random weights."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigInvalid, ModelUnavailable
from stoker.model.generation import FinishReason, VersionSpan
from support import needs

torch = pytest.importorskip("torch", reason=needs.TORCH)
from stoker.inference.in_process import choosing
from stoker.inference.in_process.engine import PREFILL_TOKENS, Running
from stoker.inference.in_process.network import Network
from support.tiny_torch import Bench, sequence, tiny_folder

TEXTS = ("hello world", "abc", "x" * 300, "the quick brown fox", "q", "hello wonder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=1)


def reference(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason=needs.TORCH)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def alone(folder: Path, text: str, **keys: Any) -> Running:
    bench = Bench(folder, slots=1)
    one = sequence(text, **keys)
    bench.finish(one)
    return one


def test_a_finished_sequence_is_replaced_in_the_next_step(folder: Path) -> None:
    bench = Bench(folder, slots=2)
    short, long, next_one = (
        sequence("short", tokens_max=3), sequence("longer", tokens_max=9), sequence("next"),
    )  # fmt: skip
    for one in (short, long, next_one):
        bench.engine.submit(one)
    slots_of_steps = []
    while bench.engine.busy:
        bench.engine.step()
        slots_of_steps.append([stretch.slot for stretch in bench.watched.steps[-1]])
    # Three steps for three tokens; from the fourth on its slot has the one that waited.
    assert slots_of_steps[:3] == [[0, 1]] * 3
    assert short.finish is FinishReason.LENGTH
    assert next_one.slot == short.slot
    assert sorted(slots_of_steps[3]) == [0, 1]
    assert len(slots_of_steps) == 3 + 8
    assert bench.engine.tokens_sampled == 3 + 9 + 8


def test_a_batch_samples_what_transformers_samples(folder: Path) -> None:
    bench = Bench(folder, slots=4)
    together = [sequence(text, tokens_max=20) for text in TEXTS]
    bench.finish(*together)
    model = reference(folder)
    for one in together:
        prompt = torch.tensor([list(one.ids[: one.prompt_tokens])])
        said = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert said[0].tolist() == list(one.ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_distribution_sampled(folder: Path, temperature: float) -> None:
    bench = Bench(folder)
    together = [sequence(text, temperature=temperature, seed=n) for n, text in enumerate(TEXTS)]
    bench.finish(*together)
    model = reference(folder)
    for one in together:
        with torch.no_grad():
            logits = model(torch.tensor([list(one.ids)])).logits[0, one.prompt_tokens - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        taken = expected[torch.arange(len(one.sampled)), torch.tensor(list(one.sampled))]
        assert torch.allclose(taken, torch.tensor(list(one.logprobs)), atol=1e-4)


def test_a_sequence_does_not_depend_on_its_batch(folder: Path) -> None:
    keys = {"temperature": 1.0, "tokens_max": 12}
    bench = Bench(folder, slots=3)
    together = [sequence(text, seed=40 + n, **keys) for n, text in enumerate(TEXTS)]
    bench.finish(*together)
    for n, one in enumerate(together):
        assert alone(folder, TEXTS[n], seed=40 + n, **keys).ids == one.ids
    other_seed = alone(folder, TEXTS[0], seed=7, **keys)
    assert other_seed.ids != together[0].ids


def test_numbers_draw_every_token_as_often_as_it_is_likely() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    count = 800
    rows = probabilities.log().expand(count, -1)
    ids, logprobs = choosing.choose(rows, [1.0] * count, [(n + 0.5) / count for n in range(count)])
    assert [ids.count(token) for token in range(5)] == [400, 0, 200, 100, 100]
    assert {round(2.718281828**one, 3) for one in logprobs} == {0.5, 0.25, 0.125}
    # Temperature 2 takes the square root; temperature 0 the likeliest, with its plain probability.
    ids, _ = choosing.choose(rows, [2.0] * count, [(n + 0.5) / count for n in range(count)])
    assert ids.count(0) == pytest.approx(
        count * 0.5**0.5 / (0.5**0.5 + 0.5 + 2 * 0.125**0.5), abs=1
    )
    ids, logprobs = choosing.choose(rows[:1], [0.0], [0.99])
    assert ids == [0]
    assert logprobs == pytest.approx([-0.6931], abs=1e-3)


def test_numbers_are_of_seed_and_place_alone() -> None:
    drawn = [choosing.number(seed, place) for seed in range(40) for place in range(50)]
    assert all(0 <= one < 1 for one in drawn)
    assert len(set(drawn)) == len(drawn)
    assert 0.47 < sum(drawn) / len(drawn) < 0.53
    assert choosing.number(3, 4) == drawn[3 * 50 + 4]


def test_the_next_turn_computes_only_what_is_new(folder: Path) -> None:
    bench = Bench(folder, slots=3)
    first, bystander = sequence("a first turn", tokens_max=6), sequence("somebody else")
    bench.finish(first, bystander)
    bench.watched.steps.clear()
    grown = array("i", [*first.ids, *b" and more"])
    second = Running(grown, tokens_max=5, temperature=0, seed=1, stop_ids=frozenset())
    bench.finish(second)
    # The last token sampled had no keys yet; the rest of the first turn was in its slot.
    assert bench.watched.computed[0] == 1 + len(b" and more")
    assert bench.watched.copied == []
    assert second.slot == first.slot
    fresh = Running(grown, tokens_max=5, temperature=0, seed=1, stop_ids=frozenset())
    Bench(folder).finish(fresh)
    assert fresh.ids == second.ids
    assert fresh.logprobs == pytest.approx(second.logprobs, abs=1e-4)


def test_samples_of_one_prompt_compute_it_once(folder: Path) -> None:
    bench = Bench(folder, slots=4)
    text = "the same task for all of the group"
    keys: dict[str, Any] = {"temperature": 1.0, "tokens_max": 4}
    group = [sequence(text, seed=n, **keys) for n in range(4)]
    bench.engine.submit(group[0])
    bench.engine.step()
    bench.finish(*group[1:])
    assert bench.watched.computed[:2] == [len(text), 1 + 3]
    assert [count for _, _, count in bench.watched.copied] == [len(text) - 1] * 3
    for n, one in enumerate(group):
        assert alone(folder, text, seed=n, **keys).ids == one.ids


def test_a_long_prompt_holds_nobody_up(folder: Path) -> None:
    bench = Bench(folder)
    running = sequence("short", tokens_max=9)
    bench.engine.submit(running)
    bench.engine.step()
    text = "long " * 260
    long = sequence(text, tokens_max=2)
    bench.finish(long)
    assert bench.watched.computed[:5] == [
        5, 1 + PREFILL_TOKENS, 1 + PREFILL_TOKENS, 1 + len(text) - 2 * PREFILL_TOKENS, 2,
    ]  # fmt: skip
    assert len(running.sampled) == 9
    model = reference(folder)
    with torch.no_grad():
        expected = model(torch.tensor([list(text.encode())])).logits[0, -1].argmax()
    assert long.sampled[0] == expected


def test_an_aborted_sequence_frees_its_slot_for_the_next_step(folder: Path) -> None:
    bench = Bench(folder, slots=1)
    first, second, third = sequence("one"), sequence("two"), sequence("three")
    for one in (first, second, third):
        bench.engine.submit(one)
    bench.engine.step()
    bench.engine.abort(first)
    bench.engine.abort(second)  # which waits
    bench.engine.step()
    assert [stretch.slot for stretch in bench.watched.steps[-1]] == [0]
    assert len(third.sampled) == 1
    bench.engine.abort(first)  # long gone: nothing happens
    bench.finish()
    assert list(bench.ended) == [third]


def test_c5_weights_that_change_inside_a_turn_are_in_its_spans(folder: Path, other: Path) -> None:
    bench = Bench(folder, slots=2)
    running = sequence("begins with the old weights", tokens_max=8)
    bench.engine.submit(running)
    for _ in range(3):
        bench.engine.step()
    bench.network.take_weights(Network.load(other, "float32"))
    bench.engine.change_weights(7)
    bench.finish()
    assert running.versions == [VersionSpan(0, 0, 3), VersionSpan(7, 3, 8)]
    # Nothing computed by the old weights serves a later sequence.
    bench.watched.steps.clear()
    again = sequence("begins with the old weights", tokens_max=8)
    bench.finish(again)
    assert bench.watched.computed[0] == len("begins with the old weights")
    assert again.versions == [VersionSpan(7, 0, 8)]
    assert again.ids == alone(other, "begins with the old weights").ids
    assert again.sampled[:3] != running.sampled[:3]


def test_other_weights_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    bench = Bench(folder)
    with pytest.raises(ConfigInvalid, match="another model"):
        bench.network.take_weights(Network.load(tiny_folder(tmp_path, layers=3), "float32"))


def test_a_step_that_fails_ends_its_calls_and_no_others(folder: Path) -> None:
    bench = Bench(folder, slots=2)
    asked = [sequence(text) for text in TEXTS[:3]]
    for one in asked:
        bench.engine.submit(one)
    bench.engine.step()
    bench.watched.fails = RuntimeError("no memory")
    with pytest.raises(RuntimeError):
        bench.engine.step()
    failure = ModelUnavailable("failed")
    bench.engine.fail(failure)
    assert bench.ended == dict.fromkeys(asked, failure)
    assert not bench.engine.busy
    bench.watched.fails = None
    after = sequence(TEXTS[0])
    bench.finish(after)
    assert after.ids == alone(folder, TEXTS[0]).ids


def test_weights_that_give_no_numbers_are_a_fault_and_harm_nobody_later(
    folder: Path, tmp_path: Path
) -> None:
    bench = Bench(folder, slots=2)
    good = bench.network.model
    broken = Network.load(folder, "float32")
    for name, weight in broken.model.named_parameters():
        if "layers.0.self_attn.k_proj" in name:
            weight.data.fill_(float("nan"))
    bench.network.take_weights(broken)
    bench.engine.change_weights(1)
    bad = sequence("a longer prompt that fills some of the slot", tokens_max=4)
    bench.finish(bad)
    assert isinstance(bench.ended[bad], ModelUnavailable)
    assert "policy version 1" in str(bench.ended[bad])
    bench.network.model = good
    bench.engine.change_weights(2)
    # Its slot holds zeros again: a short sequence beside a long one is not spoiled by the rest.
    short, long = sequence("abc"), sequence("x" * 60)
    bench.finish(short, long)
    assert short.ids == alone(folder, "abc").ids
    assert long.ids == alone(folder, "x" * 60).ids
