"""Profiles of simulated devices: one TOML file each, unknown keys refused.

A profile's seconds are seconds of the loop it runs on. ``time_scale`` multiplies every one of them
(0.1: ten times faster), and stands in the model's name, so that a scaled run is never mistaken.
"""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from stoker.config.section import Section
from stoker.config.units import Duration, seconds
from stoker.errors import ConfigInvalid

DurationOrZero = Annotated[float, BeforeValidator(seconds), Field(ge=0)]
"""Seconds, zero or more."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A probability."""


class FaultRates(Section):
    """Faults thrown in at seeded random, as shares of calls; together at most 1 (C1)."""

    too_many: Share = 0.0
    """Refused at once with 429."""
    broken: Share = 0.0
    """Refused at once with 500."""
    closed: Share = 0.0
    """The connection closes when half of the tokens are sampled."""
    hang: Share = 0.0
    """Never answers, until it is cancelled."""
    late: Share = 0.0
    """Answers, but ``late_by`` after it was done."""
    late_by: Duration = 60.0
    """How long a late answer is held back."""
    replicas: tuple[int, ...] = ()
    """Only these replicas are faulty; empty: all."""

    @model_validator(mode="after")
    def _together_at_most_one(self) -> "FaultRates":
        if self.too_many + self.broken + self.closed + self.hang + self.late > 1:
            raise ValueError("the rates together are more than 1")
        return self


class SimProfile(Section):
    """A simulated device: a step takes a + c · decoding sequences + p · new prefill tokens."""

    policy: str
    """What it says: ``scripted:FILE``, relative to the profile."""
    name: str = ""
    """For people; the file's name when empty."""
    a: Duration
    """Fixed time of a step."""
    c: DurationOrZero = 0.0
    """Time of a step for each decoding sequence."""
    p: DurationOrZero = 0.0
    """Time of a step for each new prefill token."""
    window: Annotated[int, Field(ge=1, le=100_000)]
    """Sequences a replica runs at once (B)."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Devices."""
    kv_tokens: Annotated[int, Field(ge=16)] | None = None
    """KV cache of a replica in tokens; unset: unlimited."""
    prefill_tokens_max: Annotated[int, Field(ge=1)] = 2048
    """Prefill tokens in one step at most."""
    tokens_per_turn: Annotated[int, Field(ge=1)] | None = None
    """Decode steps of every turn; unset: as long as its text."""
    bytes_per_token: Annotated[float, Field(gt=0)] = 1.0
    """Bytes of text that count as one token of the device; ids stay byte-level."""
    time_scale: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies every duration."""
    seed: int = 0
    """Of the faults."""
    faults: FaultRates = FaultRates()
    """Faults thrown in."""


def load_profile(path: Path) -> SimProfile:
    """Return the profile in ``path``.

    Raises:
        ConfigInvalid: unreadable, an unknown or mistyped key; names file, key and allowed values.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigInvalid(f"sim: profile {path} cannot be read: {error}") from error
    table.setdefault("name", path.stem)
    try:
        return SimProfile.model_validate(table)
    except ValidationError as error:
        raise ConfigInvalid(f"sim: profile {path}: {_explained(error)}") from error


def _explained(error: ValidationError) -> str:
    parts = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            section = FaultRates if key.startswith("faults.") else SimProfile
            allowed = ", ".join(sorted(section.model_fields))
            parts.append(f"unknown key {key!r}; allowed are {allowed}")
        else:
            parts.append(f"{key or 'profile'}: {problem['msg']}")
    return "; ".join(parts)
