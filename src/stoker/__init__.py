"""Stoker: the rollout execution plane. Users import what they need from here.

Names are loaded on first use, so that a worker or a ledger does not pay for rooms it never enters.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.config.load import load_settings
    from stoker.coordinator.request import RunRequest
    from stoker.errors import Cancelled, Infrastructure, StokerError
    from stoker.inference.callable import CallableModel
    from stoker.model.action import Effect
    from stoker.model.checkpoint import Checkpoint
    from stoker.model.execution import (
        Baseline,
        BaselineBuild,
        Credential,
        Destination,
        ExecutionPolicy,
        Isolation,
        Limits,
        Mount,
        Trust,
    )
    from stoker.model.generation import Message, ToolCall, ToolSpec
    from stoker.model.task import Task
    from stoker.model.tools import CallResult, RunResult, Tests, Verdict
    from stoker.rollout.chat import Chat, ModelTurn
    from stoker.rollout.context import Context
    from stoker.rollout.environment import Environment
    from stoker.rollout.plain import retry
    from stoker.rollout.program import Rollout, Tool, rollout, tool
    from stoker.rollout.score import Score, truncate
    from stoker.sandbox.alone import Boxes, BoxResult, OpenBox, box, boxes
    from stoker.training.groups import Group
    from stoker.training.run import Run, start_run
    from stoker.worker.callrunner import TooManyRequests

__version__ = "0.1.0"

_WHERE = {
    "Baseline": "stoker.model.execution",
    "BaselineBuild": "stoker.model.execution",
    "Credential": "stoker.model.execution",
    "Destination": "stoker.model.execution",
    "BoxResult": "stoker.sandbox.alone",
    "Boxes": "stoker.sandbox.alone",
    "CallResult": "stoker.model.tools",
    "CallableModel": "stoker.inference.callable",
    "Cancelled": "stoker.errors",
    "Chat": "stoker.rollout.chat",
    "Checkpoint": "stoker.model.checkpoint",
    "Context": "stoker.rollout.context",
    "Effect": "stoker.model.action",
    "Environment": "stoker.rollout.environment",
    "ExecutionPolicy": "stoker.model.execution",
    "Group": "stoker.training.groups",
    "Infrastructure": "stoker.errors",
    "Isolation": "stoker.model.execution",
    "Limits": "stoker.model.execution",
    "Message": "stoker.model.generation",
    "ModelTurn": "stoker.rollout.chat",
    "Mount": "stoker.model.execution",
    "OpenBox": "stoker.sandbox.alone",
    "Rollout": "stoker.rollout.program",
    "Run": "stoker.training.run",
    "RunRequest": "stoker.coordinator.request",
    "RunResult": "stoker.model.tools",
    "Score": "stoker.rollout.score",
    "StokerError": "stoker.errors",
    "Task": "stoker.model.task",
    "Tests": "stoker.model.tools",
    "TooManyRequests": "stoker.worker.callrunner",
    "Tool": "stoker.rollout.program",
    "ToolCall": "stoker.model.generation",
    "ToolSpec": "stoker.model.generation",
    "Trust": "stoker.model.execution",
    "Verdict": "stoker.model.tools",
    "box": "stoker.sandbox.alone",
    "boxes": "stoker.sandbox.alone",
    "load_settings": "stoker.config.load",
    "retry": "stoker.rollout.plain",
    "start_run": "stoker.training.run",
    "tool": "stoker.rollout.program",
    "truncate": "stoker.rollout.score",
}

__all__ = [
    "Baseline",
    "BaselineBuild",
    "BoxResult",
    "Boxes",
    "CallResult",
    "CallableModel",
    "Cancelled",
    "Chat",
    "Checkpoint",
    "Context",
    "Credential",
    "Destination",
    "Effect",
    "Environment",
    "ExecutionPolicy",
    "Group",
    "Infrastructure",
    "Isolation",
    "Limits",
    "Message",
    "ModelTurn",
    "Mount",
    "OpenBox",
    "Rollout",
    "Run",
    "RunRequest",
    "RunResult",
    "Score",
    "StokerError",
    "Task",
    "Tests",
    "TooManyRequests",
    "Tool",
    "ToolCall",
    "ToolSpec",
    "Trust",
    "Verdict",
    "box",
    "boxes",
    "load_settings",
    "retry",
    "rollout",
    "start_run",
    "tool",
    "truncate",
]


if not TYPE_CHECKING:  # else a type checker would believe in any name

    def __getattr__(name: str) -> Any:  # noqa: ANN401 - the module's own protocol
        if name == "rollout":
            return importlib.import_module("stoker.rollout")  # callable: see its docstring
        if name not in _WHERE:
            raise AttributeError(f"module 'stoker' has no attribute {name!r}")
        found = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = found
        return found
