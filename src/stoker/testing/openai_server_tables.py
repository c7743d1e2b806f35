"""Which routes the test server has: path → the flavours that have it (none: all), its method."""

GET = {
    "/health": ("", "health"),
    "/v1/models": ("", "models"),
    "/version": ("vllm", "version"),
    "/metrics": ("vllm sglang", "metrics"),
    "/is_paused": ("vllm", "is_paused"),
    "/weight_info": ("vllm", "weight_info"),
    "/model_info": ("sglang", "model_info"),
}
POST = {
    "/v1/chat/completions": ("", "chat"),
    "/v1/completions": ("vllm", "completion"),
    "/inference/v1/generate": ("vllm", "scaled"),
    "/generate": ("sglang", "generate"),
    "/tokenize": ("vllm sglang", "tokenize"),
    "/detokenize": ("vllm sglang", "detokenize"),
    "/pause": ("vllm", "pause"),
    "/resume": ("vllm", "resume"),
    "/reset_prefix_cache": ("vllm", "forget"),
    "/collective_rpc": ("vllm", "nothing"),
    "/update_weight_version": ("vllm", "set_version"),
    "/pause_generation": ("sglang", "pause"),
    "/continue_generation": ("sglang", "resume"),
    "/flush_cache": ("sglang", "nothing"),
    "/update_weights_from_disk": ("sglang", "set_version"),
    "/abort_request": ("sglang", "abort"),
    "/abort_requests": ("vllm", "abort_requests"),
    "/inference/v1/abort_requests": ("vllm", "abort_requests"),
}
NAMES = {
    "/v1/chat/completions": "chatcmpl-{}",
    "/v1/completions": "cmpl-{}-0",
    "/inference/v1/generate": "generate-tokens-{}",
}
"""What vLLM calls a request by its route."""
IDS = {"/tokenize", "/detokenize", "/v1/completions", "/generate", "/inference/v1/generate"}
DEVELOPMENT = {
    "/is_paused", "/weight_info", "/pause", "/resume", "/reset_prefix_cache", "/collective_rpc",
    "/update_weight_version", "/abort_requests",
}  # fmt: skip
