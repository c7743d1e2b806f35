"""The model over the engine: calls, cancellation, ends, weights, on a tiny random Llama."""

import asyncio
import json
import threading
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from stoker.errors import ConfigInvalid, ModelRefused, ModelUnavailable
from stoker.inference.callable import flaw
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
    Message,
    Role,
    unpack_logprobs,
    unpack_tokens,
)
from support import needs
from support.inference import RUN_PYTHON, request

torch = pytest.importorskip("torch", reason=needs.TORCH)
from stoker.inference.in_process import calibrate
from stoker.inference.in_process import model as model_module
from stoker.inference.in_process.calibrate import Times
from stoker.inference.in_process.engine import Engine, Running
from stoker.inference.in_process.model import TorchModel
from support.tiny_torch import VOCABULARY, Bench, tiny_folder, tiny_model

_T = TypeVar("_T")
DEADLINE = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=1)


def started(folder: Path, main: Callable[[TorchModel], Awaitable[_T]], **settings: Any) -> _T:
    """Run ``main`` with a started model, which is closed after it."""

    async def all_of_it() -> _T:
        model = tiny_model(folder, **settings)
        await model.start()
        try:
            async with asyncio.timeout(DEADLINE):
                return await main(model)
        finally:
            await model.close()

    before = threading.active_count()
    result = asyncio.run(all_of_it())
    assert threading.active_count() <= before, "a thread outlives its model"
    return result


def asked(**keys: Any) -> GenerateRequest:
    """Return a short greedy request."""
    return request(**{"temperature": 0.0, "tokens_max": 8, **keys})


async def until(true: Callable[[], bool]) -> None:
    """Wait, turn by turn of the loop, for something another thread does."""
    while not true():
        await asyncio.sleep(0.001)


def test_a_generation_is_whole(folder: Path) -> None:
    async def main(model: TorchModel) -> list[Generation]:
        await until(lambda: model.load(0).running == 0)
        return await asyncio.gather(
            *(model.generate(0, asked(temperature=1.0, seed=n, tokens_max=20)) for n in range(9))
        )

    for said in started(folder, main):
        assert flaw(said) == ""
        assert said.logprob_kind is LogprobKind.SAMPLED
        assert len(unpack_logprobs(said.logprobs)) == said.token_count
        assert all(value <= 0 for value in unpack_logprobs(said.logprobs))
        assert unpack_tokens(said.prompt_ids) == [257, *b"hello", 260, 258]
        ended = unpack_tokens(said.token_ids)[-1] == 260
        assert said.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or said.token_count == 20


def test_starting_twice_starts_once(folder: Path) -> None:
    async def main(model: TorchModel) -> None:
        thread = model._thread
        await model.start()
        assert model._thread is thread

    started(folder, main)


def test_what_it_says_of_itself(folder: Path) -> None:
    async def main(model: TorchModel) -> None:
        info = model.info()
        assert info.name == f"torch:{folder.name}"
        assert info.replicas[0].window == 4
        # 2 layers x 2 heads x 8 numbers x keys and values x 4 bytes = 256 bytes a token.
        assert info.replicas[0].kv_tokens == 64 * 1024 // 256
        assert "float32 on 1 threads" in info.notices[0]
        assert "4 sequences of at most 64 tokens" in info.notices[0]
        await asyncio.gather(*(model.generate(0, asked(seed=n)) for n in range(4)))
        load = model.load(0)
        assert (load.running, load.kv_used_share) == (0, 0)
        assert load.tokens_sampled >= 4
        assert load.tokens_prefilled >= len(b"hello") + 3
        assert 0 < load.active_seconds <= load.sequence_seconds
        assert load.capacity_tokens_per_second

    started(folder, main, kv_memory="64KiB")


def test_where_memory_allows_a_sequence_gets_as_long_as_the_model_was_made_for(
    folder: Path, tmp_path: Path
) -> None:
    async def main(model: TorchModel) -> int | None:
        return model.info().replicas[0].kv_tokens

    assert started(folder, main, window=3) == 3 * 2048
    # Shorter than the trial's prompt: it is tried with what it holds.
    assert started(tiny_folder(tmp_path, context=40), main, window=20) == 20 * 40


@pytest.mark.parametrize(("prompt", "wanted", "sampled"), [(50, 20, 14), (63, 9, 1), (64, 9, 0),
                                                          (90, 9, 0), (10, 0, 0)])  # fmt: skip
def test_the_end_of_the_context_cuts_and_is_no_failure(
    folder: Path, prompt: int, wanted: int, sampled: int
) -> None:
    async def main(model: TorchModel) -> Generation:
        ids = array("i", [*([65] * (prompt - 1)), 258]).tobytes()
        return await model.generate(0, asked(prompt_ids=ids, tokens_max=wanted))

    said = started(folder, main, kv_memory="64KiB")
    assert (said.token_count, said.finish_reason) == (sampled, FinishReason.LENGTH)
    assert len(said.prompt_ids) // 4 == prompt
    assert flaw(said) == ""


def test_c3_a_turn_cut_inside_a_tool_call_is_an_observation(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = b'<tool_call>\n{"name": "run_python", "arg'
    monkeypatch.setattr(model_module, "Engine", _saying(call))

    async def main(model: TorchModel) -> Generation:
        return await model.generate(0, asked(tools=(RUN_PYTHON,), tokens_max=len(call)))

    said = started(folder, main)
    assert said.finish_reason is FinishReason.LENGTH
    assert len(said.tool_calls) == 1
    assert "cut off" in (said.tool_calls[0].error or "")


def test_a_stop_text_ends_the_turn_in_the_step_that_completes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "Engine", _saying("one ☃END two".encode()))

    async def main(model: TorchModel) -> Generation:
        return await model.generate(0, asked(stop=("zzz", "☃END"), tokens_max=99))

    said = started(folder, main)
    assert (said.text, said.finish_reason) == ("one ", FinishReason.STOP)
    assert bytes(unpack_tokens(said.token_ids)) == "one ☃END".encode()


def test_c4_the_next_turn_goes_on_from_the_very_ids(folder: Path) -> None:
    async def main(model: TorchModel) -> tuple[Generation, Generation]:
        opening = (Message(role=Role.USER, content="go"),)
        first = await model.generate(0, asked(messages=opening, temperature=1.0))
        known = first.prompt_ids + first.token_ids
        grown = (
            *opening, Message(role=Role.ASSISTANT, content=first.text),
            Message(role=Role.TOOL, content="seen"),
        )  # fmt: skip
        before = model.load(0).tokens_prefilled
        second = await model.generate(0, asked(step=1, messages=grown, prompt_ids=known))
        new = (len(second.prompt_ids) - len(known)) // 4
        assert model.load(0).tokens_prefilled - before == new + 1
        return first, second

    first, second = started(folder, main)
    assert second.prompt_ids.startswith(first.prompt_ids + first.token_ids)
    assert not second.rerendered


def test_c5_a_weight_update_inside_a_turn_is_in_its_spans(folder: Path, other: Path) -> None:
    async def main(model: TorchModel) -> Generation:
        call = asyncio.create_task(model.generate(0, asked(tokens_max=1500)))
        await until(lambda: model.load(0).tokens_sampled > 3)
        await model.update_weights(other, 5)
        return await call

    said = started(folder, main, stop=False)
    assert said.token_count == 1500
    assert [span.policy_version for span in said.spans] == [0, 5]
    assert flaw(said) == ""


def test_c5_a_turn_ended_early_goes_on_as_if_it_had_not_been(folder: Path) -> None:
    async def main(model: TorchModel) -> tuple[Generation, Generation]:
        whole = await model.generate(0, asked(seed=8, tokens_max=400))
        turn = asked(seed=8, tokens_max=400)
        for _ in range(2):
            before = model.load(0).tokens_sampled
            call = asyncio.create_task(model.generate(0, turn))
            await until(lambda before=before: model.load(0).tokens_sampled > before + 3)  # type: ignore[misc]
            await model.interrupt()
            part = await call
            assert part.finish_reason is FinishReason.ABORTED
            assert part.token_count < 400
            turn = msgspec.structs.replace(turn, begun=part)
        return whole, await model.generate(0, turn)

    whole, turn = started(folder, main, stop=False)
    assert turn.token_ids == whole.token_ids, "each token's number is that of its place"
    assert (turn.text, turn.spans, turn.finish_reason) == (
        whole.text,
        whole.spans,
        FinishReason.LENGTH,
    )
    assert flaw(turn) == ""


def test_c5_a_turn_ended_early_goes_on_under_the_new_weights(folder: Path, other: Path) -> None:
    async def main(model: TorchModel) -> tuple[Generation, Generation]:
        call = asyncio.create_task(model.generate(0, asked(tokens_max=400)))
        await until(lambda: model.load(0).tokens_sampled > 3)
        await model.interrupt()
        part = await call
        await model.update_weights(other, 5)
        rest = asked(tokens_max=400)
        return part, await model.generate(0, msgspec.structs.replace(rest, begun=part))

    part, turn = started(folder, main, stop=False)
    assert turn.token_ids.startswith(part.token_ids)
    assert [span.policy_version for span in turn.spans] == [0, 5]
    assert turn.spans[0].end == part.token_count
    assert flaw(turn) == ""


def test_a_call_ended_before_its_first_token_has_nothing_to_go_on_from(folder: Path) -> None:
    async def main(model: TorchModel) -> None:
        calls = [asyncio.create_task(model.generate(0, asked(seed=n))) for n in range(9)]
        await until(lambda: model.load(0).running == len(calls))
        await model.interrupt()
        done = await asyncio.gather(*calls, return_exceptions=True)
        nothing = [one for one in done if isinstance(one, ModelUnavailable)]
        parts = [one for one in done if isinstance(one, Generation)]
        assert nothing, "more calls than slots"
        assert len(nothing) + len(parts) == len(calls)
        assert all(part.token_count for part in parts)

    started(folder, main, stop=False)


def test_c2_calls_go_on_while_weights_change(folder: Path, other: Path) -> None:
    async def main(model: TorchModel) -> list[Generation]:
        said: list[Generation] = []
        for version, weights in enumerate((other, folder, other), start=1):
            calls = [
                asyncio.create_task(model.generate(0, asked(seed=n, tokens_max=300)))
                for n in range(4)
            ]
            await model.update_weights(weights, version)
            said += await asyncio.gather(*calls)
        return said

    answers = started(folder, main, stop=False)
    versions = [[span.policy_version for span in one.spans] for one in answers]
    assert all(row == sorted(row) for row in versions)
    assert versions[-1][-1] == 3
    assert all(flaw(one) == "" for one in answers)


def test_weights_that_cannot_be_used_change_nothing(folder: Path, tmp_path: Path) -> None:
    deeper = tiny_folder(tmp_path / "deeper", layers=3)
    (tmp_path / "empty").mkdir()

    async def main(model: TorchModel) -> None:
        before = await model.generate(0, asked())
        for bad, said in ((deeper, "another model"), (tmp_path / "empty", "incomplete")):
            with pytest.raises(ConfigInvalid, match=said):
                await model.update_weights(bad, 9)
        after = await model.generate(0, asked())
        assert (after.token_ids, after.spans) == (before.token_ids, before.spans)

    started(folder, main)


@pytest.mark.parametrize("turns", range(7))
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_a_cancel_at_any_point_leaves_nothing_running(
    folder: Path, turns: int, tokens: int
) -> None:
    async def main(model: TorchModel) -> None:
        calls = [
            asyncio.create_task(model.generate(0, asked(seed=n, tokens_max=900))) for n in range(6)
        ]
        await until(lambda: model.load(0).tokens_sampled >= tokens)
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (model.load(0).running, model.load(0).kv_used_share) == (0, 0)
        # All four slots are free again: a full window runs side by side, and is right.
        said = await asyncio.gather(*(model.generate(0, asked()) for _ in range(4)))
        assert len({one.token_ids for one in said}) == 1

    started(folder, main, stop=False)


def test_a_step_that_fails_is_the_calls_fault_and_the_next_ones_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(model: TorchModel) -> None:
        good = await model.generate(0, asked())
        step = model._network.step

        def no_memory(stretches: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(model._network, "step", no_memory)
        calls = [model.generate(0, asked(seed=n)) for n in range(6)]
        for problem in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(problem, ModelUnavailable)
            assert "can't allocate memory" in problem.message
        monkeypatch.setattr(model._network, "step", step)
        assert (await model.generate(0, asked())).token_ids == good.token_ids

    started(folder, main)


@pytest.mark.parametrize("foreign", [VOCABULARY, -1])
def test_an_id_of_another_model_is_refused_alone(folder: Path, foreign: int) -> None:
    async def main(model: TorchModel) -> None:
        good = asyncio.create_task(model.generate(0, asked(tokens_max=50)))
        ids = array("i", [257, foreign, 258]).tobytes()
        with pytest.raises(ModelRefused, match="does not have"):
            await model.generate(0, asked(prompt_ids=ids))
        assert (await good).token_count == 50

    started(folder, main, stop=False)


def test_what_is_asked_of_a_closing_thread_is_answered(folder: Path) -> None:
    async def main(model: TorchModel) -> None:
        thread = model._thread
        assert thread is not None
        reached, let_go = threading.Event(), threading.Event()

        def held() -> None:
            reached.set()
            assert let_go.wait(DEADLINE)

        begun = asyncio.create_task(thread.do(held))
        await asyncio.to_thread(reached.wait, DEADLINE)
        never = asyncio.create_task(thread.do(lambda: pytest.fail("it was closed before")))
        given_up = asyncio.create_task(thread.do(lambda: pytest.fail("nobody waits for it")))
        await asyncio.sleep(0)
        given_up.cancel()
        closing = asyncio.create_task(model.close())
        await asyncio.sleep(0)
        let_go.set()
        await closing
        await begun
        for late in (never, asyncio.create_task(thread.do(lambda: None))):
            with pytest.raises(ModelUnavailable, match="closed"):
                await late

    started(folder, main)


def test_close_fails_what_is_in_flight(folder: Path) -> None:
    async def main(model: TorchModel) -> None:
        call = asyncio.create_task(model.generate(0, asked(tokens_max=1900)))
        await until(lambda: model.load(0).tokens_sampled > 0)
        await model.close()
        with pytest.raises(ModelUnavailable, match="closed"):
            await call
        with pytest.raises(ModelUnavailable, match="closed"):
            await model.generate(0, asked())

    started(folder, main, stop=False)


def test_a_start_that_is_given_up_leaves_no_thread(folder: Path) -> None:
    async def main() -> None:
        model = tiny_model(folder)
        starting = asyncio.create_task(model.start())
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    before = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= before


@pytest.mark.parametrize(("fast", "slow"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_faster_format_is_chosen_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fast: str, slow: str
) -> None:
    def timed(network: Any, clock: object, batch: int) -> Times:
        decode = {fast: 0.1, slow: 0.4}[network.dtype]
        return Times(dtype=network.dtype, prefill=0.1, decode=decode, batch=batch)

    monkeypatch.setattr(calibrate, "measure", timed)

    async def main(model: TorchModel) -> None:
        assert model._network.dtype == fast
        (notice,) = model.info().notices
        assert notice.startswith(f"{fast} on 1 threads")
        assert f"{fast} 100 + 100 ms" in notice
        assert f"{slow} 100 + 400 ms" in notice
        assert model.load(0).capacity_tokens_per_second == pytest.approx(40)
        assert (await model.generate(0, asked())).token_count > 0

    started(folder, main, dtype="auto")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 3, r"its weights lack model\.layers\.2"),
        ("model_type", "no-such-model", "cannot be loaded"),
        ("hidden_size", 96, "lack .* in the size its config names"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_one_sentence(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    bad = tiny_folder(tmp_path)
    config = json.loads((bad / "config.json").read_bytes())
    (bad / "config.json").write_text(json.dumps({**config, field: value}))

    async def main(model: TorchModel) -> None:
        pytest.fail("it was started")

    with pytest.raises(ConfigInvalid, match=said) as caught:
        started(bad, main)
    assert "\n" not in caught.value.message


def _saying(text: bytes) -> Callable[..., Any]:
    """Return an engine whose network always goes on with ``text`` after the prompt."""

    class Saying(Engine):
        def step(self) -> int:
            real = self.network.step

            def forced(stretches: Any) -> Any:
                logits = torch.full((sum(one.last for one in stretches), VOCABULARY), -50.0)
                for row, one in enumerate(self._running):
                    logits[row, text[len(one.logprobs)]] = 0
                return logits

            self.network.step = forced  # type: ignore[method-assign]
            try:
                return super().step()
            finally:
                self.network.step = real  # type: ignore[method-assign]

    return Saying


def test_the_thread_samples_what_the_engine_by_itself_samples(folder: Path) -> None:
    async def main(model: TorchModel) -> Generation:
        return await model.generate(0, asked())

    said = started(folder, main)
    one = Running(
        array("i", said.prompt_ids), tokens_max=8, temperature=0, seed=1,
        stop_ids=frozenset({260}),
    )  # fmt: skip
    Bench(folder).finish(one)
    assert one.sampled.tobytes() == said.token_ids
