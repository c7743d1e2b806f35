"""From ``--model`` to a model."""

from collections.abc import Callable
from pathlib import Path

from stoker.errors import ConfigInvalid
from stoker.inference.base import Model
from stoker.inference.policy import Policy, load_policy
from stoker.inference.profile import load_profile
from stoker.inference.scripted import ScriptedModel
from stoker.inference.sim import SimModel


def open_model(spec: str, *, base: Path) -> Model:
    """Return the model that ``spec`` (``KIND:PATH``) names; paths are relative to ``base``.

    Raises:
        ConfigInvalid: no such kind, or its file cannot be used.
    """
    kind, colon, rest = spec.partition(":")
    opener = _KINDS.get(kind)
    if opener is None or not colon or not rest:
        raise ConfigInvalid(
            f"model {spec!r}: there are scripted:FILE (.py, .jsonl, .toml) and sim:PROFILE "
            "(.toml); http:, torch: and callable: follow"
        )
    return opener(base / rest)


def _open_scripted(path: Path) -> Model:
    return ScriptedModel(load_policy(path))


def _open_sim(path: Path) -> Model:
    profile = load_profile(path)
    return SimModel(profile, _policy_of(profile.policy, path))


def _policy_of(spec: str, profile: Path) -> Policy:
    kind, _, rest = spec.partition(":")
    if kind != "scripted" or not rest:
        raise ConfigInvalid(f"sim: profile {profile}: policy {spec!r} is not scripted:FILE")
    return load_policy(profile.parent / rest)


_KINDS: dict[str, Callable[[Path], Model]] = {"scripted": _open_scripted, "sim": _open_sim}
