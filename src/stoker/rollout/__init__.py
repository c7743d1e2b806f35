"""Rollout programs: ordinary async functions made durable by replay, in processes of their own.

``context`` is what a program sees; ``trampoline`` drives it; ``host`` is the process;
``messages`` is what host and coordinator say to each other.

The package itself can be called: ``@stoker.rollout(…)`` is ``program.rollout``, however it was
imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package, as the decorator that users know it by."""

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - typed in stoker/__init__
        """Declare a rollout program (``program.rollout``)."""
        from stoker.rollout.program import rollout  # noqa: PLC0415 - the room loads when used

        return rollout(*args, **options)


sys.modules[__name__].__class__ = _Callable
