"""Chat templates that show histories as two known families do, in words of the package's own."""

import json

QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIALS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
    "<|end_of_text|>",
)  # fmt: skip


def qwen() -> str:
    """Return a template that renders as Qwen3's: thinking is shown until the next question."""
    from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER  # noqa: PLC0415 - an extra

    return _QWEN.replace("HEADER", json.dumps(_TOOLS_HEADER)).replace(
        "FOOTER", json.dumps(_TOOLS_FOOTER)
    )


def llama() -> str:
    """Return a template that renders as Llama 3.2's, which asks what day it is."""
    from renderers.llama_3 import _TOOLS_IN_USER_INTRO  # noqa: PLC0415 - an extra

    return _LLAMA.replace("INTRO", json.dumps(_TOOLS_IN_USER_INTRO))


_QWEN = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + HEADER }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- FOOTER + '<|im_end|>\\n' }}
{%- elif system %}{{ '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set parts = message.content.split('</think>') %}
{%- set said = parts[-1].lstrip('\\n') if parts | length > 1 else message.content %}
{%- set thought = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said }}
{%- for call in message.tool_calls or [] %}
{%- if said or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_LLAMA = """\
{%- macro open(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- bos_token + open('system') }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}
{{- '<|eot_id|>' }}
{%- set told = namespace(tools=not tools) %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
{%- if message.role == 'tool' %}
{{- open('ipython') + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- open('assistant') + '{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}
{{- open(message.role) }}
{%- if message.role == 'user' and not told.tools %}
{%- set told.tools = true %}
{{- INTRO }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
{%- endif %}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}
"""
