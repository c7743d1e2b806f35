"""A server's metrics page as figures: vLLM's names, older vLLM's and SGLang's. Pure.

Only the lines that are used are parsed: a page has thousands, most of them histogram buckets.
Engines of one server (data parallel) are summed, their KV use is the fullest one's.
"""

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stoker.inference.base import ServerLoad

_FIELDS = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_used_share": (
        "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage",
    ),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_reqs"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total",
        "sglang:prompt_tokens_total",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total",
        "sglang:cached_tokens_total",
    ),
    "iterations": ("vllm:iteration_tokens_total_count",),
    "iteration_tokens": ("vllm:iteration_tokens_total_sum",),
    "tokens_prefilled": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "tokens_sampled": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}  # fmt: skip
_BY_REASON = "vllm:num_requests_waiting_by_reason"
_CACHE = "vllm:cache_config_info"
_CACHE_TOKENS = "sglang:max_total_num_tokens"
_KNOWN = frozenset(
    {name for names in _FIELDS.values() for name in names} | {_BY_REASON, _CACHE, _CACHE_TOKENS}
)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One metrics page."""

    load: ServerLoad
    kv_tokens: int | None
    """Capacity of the KV cache, where the page says it."""


def read_page(text: str) -> Page | None:
    """Return the figures of ``text``; ``None`` where it holds none that is known.

    Raises:
        ValueError: a line that is used is malformed.
    """
    samples = [
        sample
        for family in text_string_to_metric_families("\n".join(_lines(text)) + "\n")
        for sample in family.samples
    ]
    if not samples:
        return None
    figures = {field: _value(field, names, samples) for field, names in _FIELDS.items()}
    reasons: dict[str, int] = {}
    for sample in samples:
        if sample.name == _BY_REASON:
            reason = sample.labels.get("reason", "unknown")
            reasons[reason] = reasons.get(reason, 0) + int(sample.value)
    load = msgspec.convert({**figures, "waiting_by_reason": reasons}, ServerLoad, strict=False)
    return Page(load=load, kv_tokens=_kv_tokens(samples))


def _lines(text: str) -> Iterable[str]:
    for line in text.splitlines():
        if line[:1] != "#" and line.partition("{")[0].partition(" ")[0] in _KNOWN:
            yield line


def _value(field: str, names: tuple[str, ...], samples: list[Sample]) -> float | int:
    whole = field != "kv_used_share"
    combine: Callable[[list[float]], float] = sum if whole else max
    for name in names:
        values = [sample.value for sample in samples if sample.name == name]
        if values:
            return int(combine(values)) if whole else float(combine(values))
    return 0


def _kv_tokens(samples: list[Sample]) -> int | None:
    total = 0
    for sample in samples:
        if sample.name == _CACHE_TOKENS:
            total += int(sample.value)
        if sample.name == _CACHE:
            blocks, size = (sample.labels.get(key, "") for key in ("num_gpu_blocks", "block_size"))
            if blocks.isdigit() and size.isdigit():
                total += int(blocks) * int(size)
    return total or None
