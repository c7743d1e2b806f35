"""Faults as data: what broke, whose fault it is, and whether another try is safe.

The exception classes live in ``stoker.errors``; this is the record that crosses wires and disks.
"""

from enum import StrEnum

import msgspec


class FaultSide(StrEnum):
    """Whose fault it was. Decides who may be blamed with a reward: only the policy."""

    CALLER = "caller"
    """The person or program that called us gave something unusable."""
    POLICY = "policy"
    """The model's own doing: an observation, never an exception."""
    ENVIRONMENT = "environment"
    """The user's environment, tool or rollout program broke."""
    INFRASTRUCTURE = "infrastructure"
    """Machines, processes, disks, servers. Never becomes a reward."""
    INTERNAL = "internal"
    """A bug of ours."""


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, as journalled and shown."""

    code: str
    """Stable code of the error class (``worker_lost``)."""
    side: FaultSide
    """Whose fault."""
    message: str
    """What happened, to which id, what we did, what to do next."""
    retryable: bool = False
    """Whether trying the same thing again can help."""
    context: dict[str, str] = {}
    """Ids and figures, already redacted."""
