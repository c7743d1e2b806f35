"""A model of ``transformers`` over slots of a KV cache: one forward pass per step for all of them.

The tokens of a step, one of each running sequence and a stretch of each prompt, are packed into one
row without padding. Everything but attention treats tokens alike; attention is ours (through
transformers' attention interface): it writes keys and values into the sequence's slot and lets each
token see its own sequence up to itself. So any causal model works whose attention goes through that
interface; models that keep other state (a recurrence), bias attention by position, or scale their
rotary positions by the longest sequence of the batch are refused by name.
"""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from stoker.errors import ConfigInvalid

_ATTENTION = "stoker_slots"
_STEP = "stoker_step"
_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""What some models want of attention and ours does not do."""
_SHOWN_CHARACTERS = 300
_DENSE = 1.5
"""Slots from the first to the last running one, over running ones, up to which a view of them all
is cheaper than a copy of those needed (measured: a copy doubles the time of attention)."""


class Stretch(msgspec.Struct, frozen=True):
    """Tokens of one sequence that are computed in one step."""

    slot: int
    start: int
    """Position of the first."""
    ids: Sequence[int]
    last: bool
    """The sequence ends with them: what follows is wanted."""


class Network:
    """One model's weights and its slots; belongs to one thread. ``open_slots`` before ``step``."""

    def __init__(self, model: Any, context: int) -> None:  # noqa: ANN401 - transformers' own
        self.model = model
        self.longest = context
        """Tokens of a sequence the model was made for."""
        self.context = 0
        """Tokens a slot has room for; set by ``open_slots``."""
        self._probe = _Probe()
        self.shapes = self._probe.shapes
        """Layer → key heads, width of a key, width of a value."""
        with torch.inference_mode():
            self._forward([0], [0], self._probe, torch.tensor([0]))
        self._cache: list[tuple[Any, Any]] = []

    @classmethod
    def load(cls, folder: Path, dtype: str) -> Self:
        """Load the weights in ``folder``.

        Raises:
            ConfigInvalid: they cannot be loaded, or the model is of a kind that cannot be run.
        """
        model = _loaded(folder, dtype)
        config = model.config
        context = int(getattr(config, "max_position_embeddings", 0) or 2048)
        network = cls(model, context)
        network._refuse_unknown(folder, config)
        network.longest = min(context, network._probe.window or context)
        return network

    @property
    def dtype(self) -> str:
        """Of weights, keys and values: ``bfloat16`` or ``float32``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """Ids it knows: those below this."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        numbers = sum(heads * (key + value) for heads, key, value in self._probe.shapes.values())
        return int(numbers * self.model.dtype.itemsize)

    def cast(self, dtype: str) -> None:
        """Turn weights into ``dtype``; slots are gone."""
        self.model.to(getattr(torch, dtype))
        self._cache = []

    def open_slots(self, count: int, context: int) -> None:
        """Make room for ``count`` sequences of ``context`` tokens; memory is taken as it fills."""
        self.context = context
        self._cache = []
        for layer in sorted(self._probe.shapes):
            heads, key, value = self._probe.shapes[layer]
            self._cache.append(
                (
                    self._zeros(count, heads, context, key),
                    self._zeros(count, heads, context, value),
                )
            )

    def _zeros(self, *shape: int) -> Any:  # noqa: ANN401 - a tensor
        # Zeros that the kernel gives out page by page. What is masked is multiplied by zero, and
        # zero times what old memory may hold is not always zero.
        dtype = self.model.dtype
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def wipe(self, slot: int) -> None:
        """Forget a slot whose keys and values are no numbers: they would spoil its neighbours."""
        for pair in self._cache:
            for kept in pair:
                kept[slot] = 0

    def copy(self, source: int, *, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of one slot into another."""
        for pair in self._cache:
            for kept in pair:
                kept[target, :, :count] = kept[source, :, :count]

    def take_weights(self, other: "Network") -> None:
        """Go on with the weights of ``other`` and the keys and values that are here.

        Raises:
            ConfigInvalid: it is another model.
        """
        if (other.shapes, other.vocabulary) != (self.shapes, self.vocabulary):
            raise ConfigInvalid("the new weights are of another model: layers or vocabulary differ")
        self.model = other.model

    def step(self, stretches: Sequence[Stretch]) -> Any:  # noqa: ANN401 - a tensor
        """Compute ``stretches``; return float32 logits after each that is ``last``, in order."""
        batch = _Batch(self._cache, stretches)
        ids = [one for stretch in stretches for one in stretch.ids]
        positions = [
            stretch.start + offset for stretch in stretches for offset in range(len(stretch.ids))
        ]
        with torch.inference_mode():
            return self._forward(ids, positions, batch, torch.tensor(batch.ends))[0].float()

    def _forward(self, ids: list[int], positions: list[int], step: object, ends: Any) -> Any:  # noqa: ANN401 - tensors
        return self.model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=ends,
            **{_STEP: step},
        ).logits

    def _refuse_unknown(self, folder: Path, config: Any) -> None:  # noqa: ANN401 - transformers' own
        kind = f"model folder {folder} ({config.model_type})"
        layers = int(getattr(config, "num_hidden_layers", 0) or len(self._probe.shapes))
        if len(self._probe.shapes) != layers:
            raise ConfigInvalid(
                f"{kind}: {layers - len(self._probe.shapes)} of {layers} layers keep a state that "
                "is not keys and values; torch: cannot run it"
            )
        if self._probe.unknown:
            raise ConfigInvalid(
                f"{kind} wants {', '.join(sorted(self._probe.unknown))} in its attention, which "
                "torch: does not do"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in {"dynamic", "longrope"}:
            raise ConfigInvalid(
                f"{kind}: its rotary positions ({rope['rope_type']}) depend on the longest "
                "sequence of a batch; torch: cannot run it"
            )


class _Probe:
    """Stands for a step and learns what each layer asks of attention."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """Layer → key heads, width of a key, width of a value."""
        self.unknown: set[str] = set()
        self.window: int | None = None

    def attend(self, layer: int, query: Any, key: Any, value: Any, asked: dict[str, Any]) -> Any:  # noqa: ANN401 - tensors
        self.shapes[layer] = (key.shape[0], key.shape[2], value.shape[2])
        self.unknown |= {name for name in _UNKNOWN if asked.get(name) is not None}
        window = asked.get("sliding_window")
        if window is not None:
            self.window = min(int(window), self.window or int(window))
        groups = query.shape[0] // key.shape[0]
        return value.repeat_interleave(groups, dim=0).transpose(0, 1)


class _Batch:
    """One step: where each token's keys and values go, and what it sees. Shared by all layers."""

    def __init__(self, cache: list[tuple[Any, Any]], stretches: Sequence[Stretch]) -> None:
        self._cache = cache
        slots: list[int] = []
        positions: list[int] = []
        self.ends: list[int] = []
        """Index of the last token of each stretch that is ``last``."""
        single: list[tuple[int, int, int]] = []
        self._long: list[tuple[slice, Stretch, Any]] = []
        for stretch in stretches:
            first, count = len(slots), len(stretch.ids)
            slots += [stretch.slot] * count
            positions += range(stretch.start, stretch.start + count)
            if stretch.last:
                self.ends.append(len(slots) - 1)
            if count == 1:
                single.append((stretch.slot, first, stretch.start))
            else:
                seen = torch.ones(count, stretch.start + count, dtype=torch.bool)
                where = slice(first, first + count)
                self._long.append((where, stretch, seen.tril(stretch.start)))
        self._slots, self._positions = torch.tensor(slots), torch.tensor(positions)
        self._lay_out_single(sorted(single))

    def _lay_out_single(self, single: list[tuple[int, int, int]]) -> None:
        """Lay out the sequences of one new token, which are attended to all at once."""
        self._single = bool(single)
        if not single:
            return
        slots = [slot for slot, _, _ in single]
        low, high = slots[0], slots[-1] + 1
        dense = high - low <= _DENSE * len(slots)
        self._tokens = torch.tensor([token for _, token, _ in single])
        self._seen_max = 1 + max(position for _, _, position in single)
        ends = torch.zeros(high - low if dense else len(slots), dtype=torch.long)
        self._rows = torch.tensor([slot - low for slot in slots] if dense else range(len(slots)))
        ends[self._rows] = torch.tensor([position for _, _, position in single])
        self._kept: Any = slice(low, high) if dense else torch.tensor(slots)
        self._mask = (torch.arange(self._seen_max) <= ends[:, None])[:, None, None, :]

    def attend(self, layer: int, query: Any, key: Any, value: Any, asked: dict[str, Any]) -> Any:  # noqa: ANN401 - tensors
        """Return what each token sees, as (token, head, width)."""
        keys, values = self._cache[layer]
        keys[self._slots, :, self._positions] = key.transpose(0, 1)
        values[self._slots, :, self._positions] = value.transpose(0, 1)
        heads, scale = key.shape[0], asked.get("scaling")
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        if self._single:
            # Queries that share a key head stand side by side, so that keys are not repeated.
            asking = query[:, self._tokens].transpose(0, 1)
            grouped = asking.reshape(len(self._tokens), heads, -1, query.shape[2])
            rows = query.new_zeros(self._mask.shape[0], *grouped.shape[1:])
            rows[self._rows] = grouped
            seen = scaled_dot_product_attention(
                rows,
                keys[self._kept, :, : self._seen_max],
                values[self._kept, :, : self._seen_max],
                attn_mask=self._mask,
                scale=scale,
            )
            out[self._tokens] = seen[self._rows].reshape(len(self._tokens), -1, value.shape[2])
        for where, stretch, mask in self._long:
            end = mask.shape[1]
            seen = scaled_dot_product_attention(
                query[None, :, where],
                keys[stretch.slot, None, :, :end],
                values[stretch.slot, None, :, :end],
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out[where] = seen[0].transpose(0, 1)
        return out


def _attend(
    module: Any,  # noqa: ANN401 - transformers' own
    query: Any,  # noqa: ANN401 - a tensor
    key: Any,  # noqa: ANN401 - a tensor
    value: Any,  # noqa: ANN401 - a tensor
    attention_mask: Any,  # noqa: ANN401, ARG001 - ours is in the step
    **asked: Any,  # noqa: ANN401 - what the model wants of attention
) -> tuple[Any, None]:
    """Attend for one layer, as transformers' attention interface asks."""
    step = asked[_STEP]
    return step.attend(module.layer_idx, query[0], key[0], value[0], asked)[None], None


transformers.AttentionInterface.register(_ATTENTION, _attend)


def _loaded(folder: Path, dtype: str) -> Any:  # noqa: ANN401 - transformers' own
    said = transformers.utils.logging
    verbosity = said.get_verbosity()
    said.set_verbosity_error()  # its reports are ours to tell, in one sentence
    said.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=_ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:
        # Whatever a library makes of a folder, the user gets one sentence.
        raise ConfigInvalid(
            f"model folder {folder} cannot be loaded: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:_SHOWN_CHARACTERS]}"
        ) from error
    finally:
        said.set_verbosity(verbosity)
    lacking = [*report["missing_keys"], *(row[0] for row in report["mismatched_keys"])]
    if lacking:
        raise ConfigInvalid(
            f"model folder {folder} is incomplete: its weights lack {lacking[0]} in the size its "
            "config names" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else "")
        )
    if not model.is_backend_compatible():
        raise ConfigInvalid(
            f"model folder {folder} ({model.config.model_type}): its attention cannot be replaced; "
            "torch: cannot run it"
        )
    return model.eval()
