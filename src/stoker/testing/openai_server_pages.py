"""The metrics pages of the test server, with the names vLLM and SGLang give."""

from stoker.testing.openai_server_engine import Engine


def vllm_page(engine: Engine, name: str) -> str:
    """Return vLLM's page."""
    labels = f'engine="0",model_name="{name}"'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {engine.running}.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 0.0',
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} {min(1.0, engine.running / 100)}",
        f"vllm:num_preemptions_total{{{labels}}} 0.0",
        f"vllm:prompt_tokens_total{{{labels}}} {engine.tokens_prefilled}.0",
        f"vllm:generation_tokens_total{{{labels}}} {engine.tokens_sampled}.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} {engine.prefix_queries}.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} {engine.prefix_hits}.0",
        f'vllm:iteration_tokens_total_bucket{{{labels},le="+Inf"}} {engine.tokens_sampled}.0',
        f"vllm:iteration_tokens_total_count{{{labels}}} {engine.tokens_sampled}.0",
        f"vllm:iteration_tokens_total_sum{{{labels}}} {engine.tokens_sampled}.0",
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="1000",{labels}}} 1.0',
    ]
    return "\n".join(lines) + "\n"


def sglang_page(engine: Engine, name: str) -> str:
    """Return SGLang's page."""
    labels = f'model_name="{name}"'
    lines = [
        f"sglang:num_running_reqs{{{labels}}} {engine.running}.0",
        f"sglang:num_queue_reqs{{{labels}}} 0.0",
        f"sglang:token_usage{{{labels}}} {min(1.0, engine.running / 100)}",
        f"sglang:prompt_tokens_total{{{labels}}} {engine.tokens_prefilled}.0",
        f"sglang:cached_tokens_total{{{labels}}} {engine.prefix_hits}.0",
        f"sglang:generation_tokens_total{{{labels}}} {engine.tokens_sampled}.0",
        f"sglang:max_total_num_tokens{{{labels}}} 16000.0",
    ]
    return "\n".join(lines) + "\n"
