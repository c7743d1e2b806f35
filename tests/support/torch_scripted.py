"""The in-process model with a network that says what a policy says, for the contract's tests.

Rendering, slots, batching, sampling and the thread are the real ones.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from stoker.config.tree import TorchSettings
from stoker.inference.byte_tokens import SPEAKERS
from stoker.inference.in_process.model import TorchModel
from stoker.inference.in_process.network import Network, Stretch
from stoker.inference.policy import Policy
from stoker.inference.sampling import lay_out
from stoker.model.generation import Role
from support.inference import request
from support.tiny_torch import VOCABULARY, ByteRenderer

_WINDOW = 4


class PolicyNetwork:
    """Remembers the ids of each slot, as keys and values would; the policy sees no request."""

    context = 100_000
    vocabulary = VOCABULARY

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._slots: list[list[int]] = [[] for _ in range(_WINDOW)]

    def step(self, stretches: Sequence[Stretch]) -> Any:
        rows = []
        for stretch in stretches:
            ids = [*self._slots[stretch.slot][: stretch.start], *stretch.ids]
            assert len(ids) == stretch.start + len(stretch.ids), "a slot lacks what it should hold"
            self._slots[stretch.slot] = ids
            if stretch.last:
                rows.append(self._next(ids))
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY)

    def copy(self, source: int, *, target: int, count: int) -> None:
        self._slots[target] = self._slots[source][:count]

    def wipe(self, slot: int) -> None:
        self._slots[slot] = []

    def _next(self, ids: list[int]) -> Any:
        opened = len(ids) - ids[::-1].index(SPEAKERS[Role.ASSISTANT])
        asked = request()
        said = lay_out(asked, self._policy.answer(asked), array("i")).tokens
        logits = torch.full((VOCABULARY,), float("-inf"))
        logits[said[len(ids) - opened]] = 0
        return logits


class ScriptedTorchModel(TorchModel):
    """Loads nothing."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(
            Path("scripted"),
            window=_WINDOW,
            settings=TorchSettings(),
            open_renderer=lambda _: ByteRenderer(),
        )
        self._policy = policy

    def _load(self) -> None:
        self._renderer = ByteRenderer()
        self._serve(cast("Network", PolicyNetwork(self._policy)), "scripted", ())


def scripted_torch(policy: Policy) -> TorchModel:
    """Return such a model."""
    return ScriptedTorchModel(policy)
