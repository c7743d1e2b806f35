"""Policies: where the text of scripted and simulated models comes from.

A policy is a pure function of the request (its seed included), so a call sampled again after a
crash says the same. ``scripted:FILE`` is read here: a Python file with ``answer(request)``, which
is trusted code of the user and runs inside the coordinator, or a table of turns per task:

- ``.jsonl``: one ``{"task_id": "HumanEval/0", "turns": ["text", {"text": …, "tool_calls": […]}]}``
  a line;
- ``.toml``: ``"HumanEval/0" = ["text", {text = "…", tool_calls = [{name = "run"}]}]``.

Task ``*`` answers for every task that has no entry of its own. Turn ``step`` of a rollout gets the
``step``-th entry, and the last one again after that.
"""

import importlib.util
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stoker.errors import ConfigInvalid, ProgramRaised
from stoker.model.generation import FinishReason, GenerateRequest
from stoker.model.value import content_digest

ANY_TASK = "*"


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call to be sampled."""

    name: str
    arguments: dict[str, Any] | str = {}
    """An object, or the raw text sampled in its place (which need not be JSON)."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy says in one turn."""

    text: str = ""
    tool_calls: tuple[AnswerCall, ...] = ()
    """Sampled after the text, one after another."""
    finish_reason: FinishReason | None = None
    """``None``: derived from what was sampled."""
    tokens_max: int | None = None
    """Cut after so many tokens, or at the request's own limit where that is less."""


class Policy(Protocol):
    """Says what a model answers."""

    @property
    def name(self) -> str:
        """Short name for people."""
        ...

    def answer(self, request: GenerateRequest) -> Answer:
        """Return the answer to ``request``; the same for the same request.

        Raises:
            StokerError: the policy has no answer; the rollout fails with it.
        """
        ...


class _Turns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task_id: str
    turns: tuple[str | Answer, ...]


class TablePolicy:
    """Answers from a table of turns per task."""

    def __init__(self, name: str, turns: dict[str, tuple[Answer, ...]]) -> None:
        self.name = name
        self._turns = turns

    def answer(self, request: GenerateRequest) -> Answer:
        """Return the turn the table holds for this task and step."""
        turns = self._turns.get(request.task_id) or self._turns.get(ANY_TASK)
        if not turns:
            raise ConfigInvalid(
                f"{self.name} has no turns for task {request.task_id!r} and none for "
                f"{ANY_TASK!r}; the call was not answered. Add one of the two.",
                task_id=request.task_id,
            )
        return turns[min(request.step, len(turns) - 1)]


class FunctionPolicy:
    """Answers by calling a function: ``str``, ``dict`` or ``Answer``."""

    def __init__(self, name: str, function: Callable[[GenerateRequest], object]) -> None:
        self.name = name
        self._function = function

    def answer(self, request: GenerateRequest) -> Answer:
        """Return what the function says about ``request``."""
        where = f"{self.name}, task {request.task_id!r}, step {request.step}"
        try:
            said = self._function(request)
        except Exception as error:
            # Boundary to the user's code: whatever it raises fails this rollout, typed.
            raise ProgramRaised(
                f"{where}: the policy raised {type(error).__name__}: {error}; "
                "the rollout fails without a reward. Correct answer().",
                task_id=request.task_id,
            ) from error
        return _answer(said, where)


def load_policy(path: Path) -> Policy:
    """Return the policy that ``path`` (``.py``, ``.jsonl`` or ``.toml``) holds.

    Raises:
        ConfigInvalid: it cannot be read or is none; says the line where there is one.
    """
    loaders = {".py": _load_function, ".jsonl": _load_lines, ".toml": _load_table}
    loader = loaders.get(path.suffix)
    if loader is None:
        raise ConfigInvalid(f"scripted: {path} is none of {', '.join(loaders)}")
    if not path.is_file():
        raise ConfigInvalid(f"scripted: there is no file {path}")
    return loader(path)


def _load_function(path: Path) -> Policy:
    name = f"stoker_policy_{content_digest(str(path.resolve()).encode())[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Boundary to the user's code: an import may raise anything at all.
        del sys.modules[name]
        raise ConfigInvalid(
            f"scripted: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, "answer", None)
    if not callable(function):
        raise ConfigInvalid(f"scripted: {path} has no function answer(request)")
    return FunctionPolicy(f"scripted:{path.name}", function)


def _load_lines(path: Path) -> Policy:
    turns: dict[str, tuple[Answer, ...]] = {}
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"scripted: {path}, line {number}"
        try:
            entry = msgspec.json.decode(line, type=_Turns)
        except msgspec.MsgspecError as error:
            raise ConfigInvalid(f"{where}: {error}") from error
        if entry.task_id in turns:
            raise ConfigInvalid(f"{where}: a second entry for task {entry.task_id!r}")
        turns[entry.task_id] = _turns(entry.turns, where)
    return TablePolicy(f"scripted:{path.name}", turns)


def _load_table(path: Path) -> Policy:
    try:
        table = msgspec.convert(tomllib.loads(_text(path)), dict[str, tuple[str | Answer, ...]])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigInvalid(f"scripted: {path}: {error}") from error
    turns = {task: _turns(said, f"scripted: {path}, task {task!r}") for task, said in table.items()}
    return TablePolicy(f"scripted:{path.name}", turns)


def _turns(said: tuple[str | Answer, ...], where: str) -> tuple[Answer, ...]:
    if not said:
        raise ConfigInvalid(f"{where}: the list of turns is empty")
    return tuple(_answer(turn, where) for turn in said)


def _answer(said: object, where: str) -> Answer:
    if isinstance(said, Answer):
        return said
    if isinstance(said, str):
        return Answer(text=said)
    try:
        return msgspec.convert(said, Answer)
    except msgspec.ValidationError as error:
        raise ConfigInvalid(
            f"{where}: the answer is not usable ({error}); "
            "allowed are a text, an Answer, or a dict with the fields of Answer"
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"scripted: {path} cannot be read: {error}") from error
