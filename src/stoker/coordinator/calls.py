"""One context verb that a program awaits, and what stands for it outside the program."""

import asyncio
from dataclasses import dataclass, field

from stoker.model.completion import CompletionStatus
from stoker.model.events import Verb
from stoker.model.ids import ActionId, CallPath


@dataclass(slots=True)
class Call:
    """One call the program awaits."""

    path: CallPath
    verb: Verb
    arguments: bytes
    issued_at: float
    """Monotonic seconds of this coordinator."""
    action_id: ActionId | None = None
    """The action that stands for it now."""
    worker_class: str = ""
    """Class of that action; empty: none was submitted yet."""
    generation: int = 0
    """Life of its environment which that action was meant for."""
    spent: list[ActionId] = field(default_factory=list)
    """Actions that stood for it before (retries, lost environments)."""
    retries: int = 0
    task: asyncio.Task[None] | None = None
    """Its running model call."""
    timer: asyncio.TimerHandle | None = None
    status: CompletionStatus = CompletionStatus.OK
    """How it ended, once it has: when it is run again for a rebuild, it must end the same way."""
