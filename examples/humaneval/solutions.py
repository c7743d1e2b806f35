"""The problems' own solutions as policy: what ``model_program.py`` must turn into 164 of 164.

If a right answer failed here, the boxes, the checks or the judge would be wrong, not a model.
"""

import sys
from pathlib import Path
from typing import Any

from stoker.model.generation import GenerateRequest

sys.path.insert(0, str(Path(__file__).parent))

from problems import read_problems


def answer(request: GenerateRequest) -> dict[str, Any]:
    """Return the published answer, as a model would write it."""
    return {"text": f"```python\n{read_problems()[request.task_id].solution}\n```"}
