"""SmolLM2 out of its wheel, as a run would use it: conversion, prompt, sampling, text."""

import asyncio
import json
from pathlib import Path

import pytest

from stoker.config.tree import ModelSettings, TorchSettings
from stoker.inference.open import open_model, start_model
from stoker.model.generation import (
    FinishReason,
    Generation,
    Message,
    Role,
    unpack_tokens,
)
from support import needs
from support.inference import request

torch = pytest.importorskip("torch", reason=needs.TORCH)
import transformers

from stoker.inference.in_process.smollm2 import MARK, smollm2_folder

WEIGHTS_SHA256 = "a0efc45b71d0592322e7ca97b04b681e59ac6b9d96cd7f1b4f60623ea7dd2b5b"
"""Equal, weight by weight, to what transformers 5.24 makes of the same file, rounded to bf16."""
QUESTIONS = ("What is the capital of France?", "Count from 1 to 5.", "Say hello.")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(cache: Path) -> Path:
    return smollm2_folder(cache / "stoker")


def ask(folder: Path, *questions: str, tokens_max: int, **settings: object) -> list[Generation]:
    async def main() -> list[Generation]:
        model = open_model(
            f"torch:{folder}",
            base=Path(),
            settings=ModelSettings(
                window=4, torch=TorchSettings.model_validate({"threads": 1, **settings})
            ),
        )
        await start_model(model)
        try:
            calls = [
                model.generate(
                    0,
                    request(
                        f"rol_{question}",
                        messages=(Message(role=Role.USER, content=question),),
                        tokens_max=tokens_max,
                        temperature=0,
                    ),
                )
                for question in questions
            ]
            return await asyncio.gather(*calls)
        finally:
            await model.close()

    return asyncio.run(main())


def test_the_conversion_gives_the_weights_it_was_checked_with(folder: Path) -> None:
    assert json.loads((folder / MARK).read_bytes())["model.safetensors"] == WEIGHTS_SHA256


def test_it_samples_what_transformers_samples_token_by_token(folder: Path) -> None:
    answers = ask(folder, *QUESTIONS, tokens_max=24, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for question, said in zip(QUESTIONS, answers, strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        assert unpack_tokens(said.prompt_ids) == prompt["input_ids"][0].tolist()
        whole = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0].tolist()
        sampled = unpack_tokens(said.token_ids)
        assert sampled == whole[prompt["input_ids"].shape[1] :]
        ended = sampled[-1] == tokenizer.eos_token_id
        assert said.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert said.text == tokenizer.decode(sampled, skip_special_tokens=True)
    assert "Paris" in answers[0].text


def test_it_runs_by_its_name_from_the_cache(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    made = (folder / MARK).stat().st_mtime_ns
    (said,) = ask(Path("smollm2"), QUESTIONS[0], tokens_max=12)
    assert (folder / MARK).stat().st_mtime_ns == made
    assert "Paris" in said.text


@pytest.mark.parametrize("cut", [5, 60])
def test_c4_its_next_turn_goes_on_from_the_very_ids(folder: Path, cut: int) -> None:
    opening = (Message(role=Role.USER, content="What is the capital of France?"),)

    async def main() -> tuple[Generation, Generation, int]:
        model = open_model(
            f"torch:{folder}",
            base=Path(),
            settings=ModelSettings(window=2, torch=TorchSettings(dtype="bfloat16", threads=1)),
        )
        await start_model(model)
        try:
            first = await model.generate(
                0, request(messages=opening, tokens_max=cut, temperature=1.0, seed=5)
            )
            computed = model.load(0).tokens_prefilled
            said = Message(role=Role.ASSISTANT, content=first.text)
            second = await model.generate(
                0,
                request(
                    step=1,
                    messages=(*opening, said, Message(role=Role.USER, content="And of Spain?")),
                    prompt_ids=first.prompt_ids + first.token_ids,
                    tokens_max=8,
                ),
            )
            return first, second, model.load(0).tokens_prefilled - computed
        finally:
            await model.close()

    first, second, computed = asyncio.run(main())
    known = first.prompt_ids + first.token_ids
    assert second.prompt_ids.startswith(known)
    assert not second.rerendered
    assert first.finish_reason is (FinishReason.LENGTH if cut == 5 else FinishReason.STOP)
    # Only what came since, and the last id sampled, whose keys nobody had needed yet.
    assert computed == (len(second.prompt_ids) - len(known)) // 4 + 1
