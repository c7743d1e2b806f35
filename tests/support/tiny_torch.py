"""A tiny Llama with random weights and byte-level tokens, made where a test needs it."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from stoker.config.tree import TorchSettings
from stoker.inference.byte_tokens import END, ids_text, prompt_of
from stoker.inference.in_process.engine import Engine, Running
from stoker.inference.in_process.model import TorchModel
from stoker.inference.in_process.network import Network, Stretch
from stoker.inference.tokens.base import Reading, RenderedPrompt
from stoker.model.generation import GenerateRequest
from stoker.model.toolcalls import parse_tool_calls

torch.set_num_threads(1)  # with two, a busy machine of two cores spins more than it computes
VOCABULARY = 262
"""Bytes and the specials of ``byte_tokens``."""
NEVER: frozenset[int] = frozenset()


def tiny_folder(folder: Path, *, seed: int = 0, layers: int = 2, context: int = 2048) -> Path:
    """Write a model folder; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=257,
        eos_token_id=END,
        initializer_range=0.2,  # far from uniform: a wrong key or position shows at once
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


class ByteRenderer:
    """Renders as scripted models do."""

    def __init__(self) -> None:
        self.stop_ids = frozenset({END})

    def prompt(self, request: GenerateRequest) -> RenderedPrompt:
        return RenderedPrompt(ids=prompt_of(request))

    def read(self, token_ids: "array[int]", request: GenerateRequest) -> Reading:
        text = ids_text(token_ids)
        return Reading(text=text, tool_calls=parse_tool_calls(text, request.tools))

    def text(self, token_ids: "array[int]") -> str:
        return ids_text(token_ids)


def tiny_model(
    folder: Path, *, window: int = 4, stop: bool = True, **settings: object
) -> TorchModel:
    """Return a model over ``folder`` that is not started; ``stop=False``: no id ends a turn."""
    renderer = ByteRenderer()
    if not stop:
        renderer.stop_ids = NEVER
    return TorchModel(
        folder,
        window=window,
        settings=TorchSettings.model_validate({"dtype": "float32", "threads": 1, **settings}),
        open_renderer=lambda _: renderer,
    )


def sequence(text: str, **keys: Any) -> Running:
    """Return a sequence that begins with ``text`` and samples greedily."""
    given = {"tokens_max": 8, "temperature": 0.0, "seed": 1, "stop_ids": NEVER, **keys}
    return Running(array("i", list(text.encode())), **given)


class Watched:
    """A network that remembers what each step computed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.steps: list[list[Stretch]] = []
        self.copied: list[tuple[int, int, int]] = []
        self.fails: Exception | None = None

    def step(self, stretches: Sequence[Stretch]) -> Any:
        self.steps.append(list(stretches))
        if self.fails is not None:
            raise self.fails
        return self.network.step(stretches)

    def copy(self, source: int, *, target: int, count: int) -> None:
        self.copied.append((source, target, count))
        self.network.copy(source, target=target, count=count)

    def wipe(self, slot: int) -> None:
        self.network.wipe(slot)

    @property
    def computed(self) -> list[int]:
        """Tokens of each step."""
        return [sum(len(stretch.ids) for stretch in step) for step in self.steps]


class Bench:
    """An engine over a tiny network, stepped by hand."""

    def __init__(self, folder: Path, *, slots: int = 4, context: int = 2048) -> None:
        self.network = Network.load(folder, "float32")
        self.network.open_slots(slots, context)
        self.watched = Watched(self.network)
        self.ended: dict[Running, Exception | None] = {}
        self.engine = Engine(self.watched, slots, self.ended.__setitem__)

    def finish(self, *sequences: Running) -> None:
        """Run ``sequences`` together to their ends."""
        for one in sequences:
            self.engine.submit(one)
        while self.engine.busy:
            self.engine.step()
