"""From ``--model`` to a model."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from stoker.config.tree import ModelSettings
from stoker.errors import ConfigInvalid
from stoker.inference.base import Model, Starting
from stoker.inference.policy import Policy, load_policy
from stoker.inference.profile import load_profile
from stoker.inference.scripted import ScriptedModel
from stoker.inference.sim import SimModel

_FORMS = (
    "there are scripted:FILE (.py, .jsonl, .toml), sim:PROFILE (.toml) and "
    "http://HOST:PORT[,http://HOST2:PORT]"
)


def open_model(spec: str, *, base: Path, settings: ModelSettings | None = None) -> Model:
    """Return the model that ``spec`` (``KIND:PATH`` or addresses) names.

    Paths are relative to ``base``. ``start_model`` comes before its first use.

    Raises:
        ConfigInvalid: no such kind, or its file or addresses cannot be used.
    """
    kind, colon, rest = spec.partition(":")
    if kind in {"http", "https"} and colon:
        return _open_http(spec, settings or ModelSettings())
    if kind == "callable":
        raise ConfigInvalid(
            f"model {spec!r}: a callable model is an object of the process that owns the engine; "
            "hand it over with execute(request, model=CallableModel(…))"
        )
    opener = _KINDS.get(kind)
    if opener is None or not colon or not rest:
        raise ConfigInvalid(f"model {spec!r}: {_FORMS}")
    return opener(base / rest)


async def start_model(model: Model, stopped: Awaitable[None] | None = None) -> None:
    """Let a model that must be reached first find out what it is; nothing to do for others.

    Raises:
        ConfigInvalid: it cannot be used as configured, or ``stopped`` came first.
    """
    if not isinstance(model, Starting):
        if isinstance(stopped, Coroutine):
            stopped.close()
        return
    starting = asyncio.ensure_future(model.start())
    ending = [asyncio.ensure_future(stopped)] if stopped is not None else []
    try:
        await asyncio.wait([starting, *ending], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise ConfigInvalid("stopped before the model server had answered; nothing was started")
        starting.result()
    finally:
        for task in (starting, *ending):
            task.cancel()
        await asyncio.wait([starting, *ending])


def _open_http(spec: str, settings: ModelSettings) -> Model:
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigInvalid(
            f"model {spec!r} needs an HTTP client, which is not installed: pip install aiohttp"
        )
    from stoker.inference.http.model import HttpModel, servers  # noqa: PLC0415 - an extra

    return HttpModel(servers(spec), settings)


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
