"""From ``--model`` to a model."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path

from stoker.config.tree import ModelSettings
from stoker.errors import ConfigInvalid
from stoker.inference.base import Model, Starting
from stoker.inference.in_process.folder import check_folder
from stoker.inference.in_process.smollm2 import check_available
from stoker.inference.policy import Policy, load_policy
from stoker.inference.profile import load_profile
from stoker.inference.scripted import ScriptedModel
from stoker.inference.sim import SimModel
from stoker.inference.tokens.open import open_renderer

SMOLLM2 = "smollm2"
"""The model that comes inside a wheel: ``torch:smollm2``."""
_TORCH_NEEDS = ("torch", "transformers")

_FORMS = (
    "there are scripted:FILE (.py, .jsonl, .toml), sim:PROFILE (.toml), torch:FOLDER or "
    "torch:smollm2, and http://HOST:PORT[,http://HOST2:PORT]"
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
    if kind == "torch" and rest:
        return _open_torch(spec, base, settings or ModelSettings())
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
    from stoker.inference.http.addresses import servers  # noqa: PLC0415 - an extra
    from stoker.inference.http.model import HttpModel  # noqa: PLC0415 - an extra

    return HttpModel(servers(spec), settings)


def require_torch(spec: str) -> None:
    """Pass when models in this process can be run.

    Raises:
        ConfigInvalid: what they need is not installed; the message says how to get it.
    """
    missing = [name for name in _TORCH_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigInvalid(
            f"model {spec!r} needs {', '.join(missing)}, not installed; nothing was started: pip "
            "install 'stoker[torch,tokens]' (a small CPU build of torch: first pip install torch "
            "--index-url https://download.pytorch.org/whl/cpu)"
        )


def _open_torch(spec: str, base: Path, settings: ModelSettings) -> Model:
    named = spec.removeprefix("torch:")
    folder = None if named == SMOLLM2 else base / named
    if folder is not None:
        check_folder(folder)
    require_torch(spec)
    if folder is None:
        check_available()
    from stoker.inference.in_process.model import TorchModel  # noqa: PLC0415 - an extra

    return TorchModel(
        folder,
        window=settings.window,
        settings=settings.torch,
        open_renderer=partial(open_renderer, history=settings.history),
    )


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
