"""From a GGUF file of a Llama with a byte-level BPE tokenizer to a Hugging Face folder.

Reads with the ``gguf`` package and writes bf16 safetensors, config, generation config, tokenizer
and chat template itself: neither torch nor transformers is needed, and no second copy of the
weights is held. Other architectures and tokenizers are refused, since each has rules of its own
(which weights are permuted, how text is split) that would otherwise be got wrong in silence.
"""

import json
import os
import struct
from pathlib import Path
from typing import Any

from stoker.errors import ConfigInvalid

_CONTROL = (3, 4)
"""Token types of special tokens in GGUF: control and user-defined."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}


def write_folder(source: Path, folder: Path) -> None:
    """Write the model in ``source`` into the existing, empty ``folder``.

    Raises:
        ConfigInvalid: ``source`` holds another kind of model, or ``gguf`` is not installed.

    **Durability:** every file is synced; the folder itself is not.
    """
    try:
        import gguf  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigInvalid(
            "converting a GGUF file needs the package gguf, which is not installed: "
            "pip install 'stoker[torch]'"
        ) from error
    reader = gguf.GGUFReader(source)
    said = {name: field.contents() for name, field in reader.fields.items()}
    for field, known in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if said.get(field) != known:
            raise ConfigInvalid(f"{source}: {field} is {said.get(field)!r}; only {known} is known")
    _write(folder / "config.json", _json(_config(said)))
    ends = {"bos_token_id", "eos_token_id", "pad_token_id"}
    _write(
        folder / "generation_config.json",
        _json({key: value for key, value in _config(said).items() if key in ends}),
    )
    _write(folder / "tokenizer.json", _json(_tokenizer(said)))
    _write(folder / "tokenizer_config.json", _json(_tokenizer_config(said)))
    _write_weights(folder / "model.safetensors", reader.tensors, said)


def _config(said: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": said["llama.vocab_size"],
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": said["llama.attention.head_count"],
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "max_position_embeddings": said["llama.context_length"],
        "rope_theta": said["llama.rope.freq_base"],
        # Kept as float32 there: its seven digits are what was meant.
        "rms_norm_eps": float(f"{said['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(said: dict[str, Any]) -> dict[str, Any]:
    tokens, types = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, kind in enumerate(types)
            if kind in _CONTROL
        ],
        "normalizer": None,
        # What "smollm" names: digits stand alone, then the words of GPT-2.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": said["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(said: dict[str, Any]) -> dict[str, Any]:
    tokens = said["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # tokenizer.json is the whole truth
        "bos_token": tokens[said["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[said["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[said["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[said["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": said["llama.context_length"],
        "chat_template": said["tokenizer.chat_template"],
    }


def _write_weights(path: Path, tensors: list[Any], said: dict[str, Any]) -> None:
    """Write safetensors: a header of offsets, then each tensor as bf16, one at a time."""
    rows = sorted((_name(tensor.name), tensor) for tensor in tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in rows:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts from the innermost
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [at, at + 2 * int(tensor.n_elements)],
        }
        at += 2 * int(tensor.n_elements)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, tensor in rows:
            file.write(_bf16(_weight(name, tensor, said)))
        file.flush()
        os.fsync(file.fileno())


def _name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return f"model.{_TOP[parts[0]]}.weight"


def _weight(name: str, tensor: Any, said: dict[str, Any]) -> Any:  # noqa: ANN401 - numpy
    from gguf import quants  # noqa: PLC0415 - an extra

    weight = quants.dequantize(tensor.data, tensor.tensor_type)
    heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(name.split(".")[-2])
    if heads is None:
        return weight
    # llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head: the rows of
    # queries and keys stand in another order.
    count = said[f"llama.attention.{heads}"]
    rows, columns = weight.shape
    pairs = weight.reshape(count, rows // count // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _bf16(weight: Any) -> bytes:  # noqa: ANN401 - numpy
    """Return float32 weights as bf16, rounded to the nearest, ties to even."""
    import numpy  # noqa: PLC0415, ICN001 - an extra; one use

    bits = numpy.ascontiguousarray(weight, dtype=numpy.float32).view(numpy.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    packed: bytes = rounded.astype("<u2").tobytes()
    return packed


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
