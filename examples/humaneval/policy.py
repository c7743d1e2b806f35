"""What the simulated model says: first a slip, then, shown the traceback, the right answer.

The policy reads what the box really printed: without a failure in front of it, it would hand in its
damaged solution. A pure function of the request, so a call that is sampled again says the same.
"""

import sys
from pathlib import Path
from typing import Any

from stoker.model.generation import GenerateRequest, Message, Role

# These lie beside this file, which is itself loaded by its path.
sys.path.insert(0, str(Path(__file__).parent))

from damage import damaged
from problems import read_problems


def answer(request: GenerateRequest) -> dict[str, Any]:
    """Return the next turn for ``request``."""
    last = request.messages[-1]
    if last.role is not Role.TOOL:
        code = damaged(request.task_id)
        call = {"name": "run_tests", "arguments": {"code": code}}
        return {"text": "Let me try this.", "tool_calls": [call]}
    if _failed(last):
        return {"text": _fenced(read_problems()[request.task_id].solution)}
    return {"text": _fenced(damaged(request.task_id))}


def _failed(seen: Message) -> bool:
    return "Traceback (most recent call last)" in seen.content


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
