"""Write docs/reference from the code: settings, metrics, errors, crash points, the box API.

``python tools/reference.py`` rewrites the pages; a golden test holds them to the code. The pages
state the present only, and a name that is not in the code cannot be in them.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import annotated_types
import msgspec
from pydantic.fields import FieldInfo

import stoker
from stoker import errors
from stoker.config import keys
from stoker.config.load import load_settings
from stoker.config.show import meaning, rows, value_text
from stoker.observe.catalogue import LOG_EVENTS, METRICS
from stoker.seams.faultpoints import ACTIONS, POINTS, TRIED
from stoker.worker.log import EVENTS as WORKER_EVENTS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
MADE = "<!-- Made by tools/reference.py from the code; do not edit. -->"


def main() -> int:
    """Write every page; say which changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        page = FOLDER / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(FOLDER.parent.parent)}")
    return 0


def pages() -> dict[str, str]:
    """Return file name → content of every page."""
    return {
        "settings.md": "\n".join([MADE, *settings(), ""]),
        "metrics.md": "\n".join([MADE, *metrics(), ""]),
        "errors.md": "\n".join([MADE, *error_codes(), ""]),
        "crash-points.md": "\n".join([MADE, *crash_points(), ""]),
        "boxes.md": "\n".join([MADE, *box_api(), ""]),
    }


def settings() -> Iterator[str]:
    """Yield the page of settings."""
    yield from (
        "# Settings",
        "",
        "Precedence: defaults < TOML (`--config FILE`) < environment < `--set KEY=VALUE`. In the",
        "environment a setting is `STOKER_` and its key in capitals, two underscores for each dot:",
        "`STOKER_WORKERS__CLASSES__FAST__SLOTS=4`. Durations take `ms`, `s`, `m`, `h`, `d`; sizes",
        "take `B`, `KiB`, `MiB`, `GiB`, `TiB`; plain numbers are seconds and bytes. `NAME` is a",
        "name of your choice. An unknown or unusable setting is refused with file and line.",
        "`stoker config show` prints each value with its origin.",
    )
    defaults = {row.key: row.value for row in rows(load_settings())}
    section = ""
    for key in keys.all_keys():
        if key.path[0] != section:
            section = key.path[0]
            yield from (
                "",
                f"## {section}",
                "",
                "| key | default | meaning |",
                "| --- | --- | --- |",
            )
        yield f"| `{keys.dotted(key.path)}` | {_default(key, defaults)} | {_meaning(key)} |"


def metrics() -> Iterator[str]:
    """Yield the page of metrics and log events."""
    yield from (
        "# Metrics and log events",
        "",
        "Prometheus, on loopback where `observe.metrics_port` says so. The lane's active share is",
        "`stoker_lane_active_seconds_total` over `stoker_lane_seconds_total`; read it together",
        "with throughput, batch occupancy and idle-while-ready, since a lane of tiny batches is",
        "busy and slow at once.",
        "",
        "| metric | kind | labels | what it says | measured by |",
        "| --- | --- | --- | --- | --- |",
    )
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {metric.where} |"
    for title, log_events in (
        ("`logs/coordinator.log`", LOG_EVENTS),
        ("`logs/worker-NAME.log`", WORKER_EVENTS),
    ):
        yield from ("", f"## Log events of {title}", "")
        yield from ("| event | what it says |", "| --- | --- |")
        for name, says in log_events.items():
            yield f"| `{name}` | {says.replace('``', '`')} |"


def error_codes() -> Iterator[str]:
    """Yield the page of errors."""
    yield from (
        "# Errors",
        "",
        "Every error has a stable code, a side whose fault it is, and says whether another try can",
        "help. Errors of the caller end a command with exit code 2 and one sentence. An",
        "infrastructure fault taints its rollout and can never become a reward.",
        "",
        "| code | side | retryable | what happened |",
        "| --- | --- | --- | --- |",
    )
    for cls in sorted(_classes(errors.StokerError), key=lambda c: (c.side.value, c.code)):
        says = (cls.__doc__ or "").strip().splitlines()[0]
        yield f"| `{cls.code}` | {cls.side} | {'yes' if cls.retryable else 'no'} | {says} |"


def crash_points() -> Iterator[str]:
    """Yield the page of fault points."""
    for name in (
        *("broker.owner", "coordinator.execute", "rollout.host", "worker.main"),
        *("broker.postgres.session", "coordinator.backups", "export.files"),
    ):
        importlib.import_module(f"stoker.{name}")  # these declare every point
    yield from (
        "# Crash points",
        "",
        "Where the crash floor ends a real process of a real run, or makes a write or a message",
        "fail, and compares what comes of it with a run that was left alone. A point that no test",
        "reaches fails the floor. `STOKER_FAULT=NAME=ACTION[@N]` arms one, at its N-th time, in a",
        "process and in whatever it starts.",
        "",
        f"{len(POINTS)} points, {sum(map(len, TRIED.values()))} trials.",
        "",
        "| action | what happens |",
        "| --- | --- |",
    )
    yield from (f"| `{action}` | {says} |" for action, says in ACTIONS.items())
    yield from ("", "| point | what is about to happen | tried there |", "| --- | --- | --- |")
    for name, says in sorted(POINTS.items()):
        yield f"| `{name}` | {says} | {', '.join(f'`{action}`' for action in TRIED[name])} |"


def box_api() -> Iterator[str]:
    """Yield the page of the box API."""
    yield from (
        "# Boxes on their own",
        "",
        "How they are used: [the guide](../guides/boxes.md).",
        "",
        "| call | what it does |",
        "| --- | --- |",
    )
    calls = {"stoker.box": stoker.box, "stoker.boxes": stoker.boxes, "Boxes.box": stoker.Boxes.box}
    verbs = ("run", "write_files", "read_file", "export", "score", "checkpoint", "branch", "remove")
    for name in verbs:
        calls[f"OpenBox.{name}"] = getattr(stoker.OpenBox, name)
    for name, call in calls.items():
        signature = re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", str(inspect.signature(call)))
        shown = signature.replace("self, ", "").partition(" ->")[0].replace("|", "\\|")
        says = (inspect.getdoc(call) or "").partition("\n")[0].replace("``", "`")
        yield f"| `{name}{shown}` | {says} |"
    records = (
        stoker.ExecutionPolicy, stoker.Limits, stoker.Mount, stoker.Destination, stoker.Credential,
        stoker.Baseline, stoker.BaselineBuild,
    )  # fmt: skip
    for record in (*records, stoker.BoxResult, stoker.Checkpoint):
        yield from ("", f"## {record.__name__}", "", (record.__doc__ or "").partition("\n")[0], "")
        yield from ("| field | default |", "| --- | --- |")
        for field in msgspec.structs.fields(record):
            made = field.default_factory
            default = field.default if made is msgspec.NODEFAULT else made()
            yield f"| `{field.name}` | {_shown_default(default)} |"


def _shown_default(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return "required"
    if isinstance(default, msgspec.Struct):
        return f"`{type(default).__name__}()`"
    return f"`{str(default) if isinstance(default, StrEnum) else repr(default)}`"


def _classes(base: type[errors.StokerError]) -> Iterator[type[errors.StokerError]]:
    if base.__module__ == errors.__name__:
        yield base
    for cls in base.__subclasses__():
        yield from _classes(cls)


def _default(key: keys.Key, defaults: dict[str, str]) -> str:
    named = keys.dotted(key.path)
    for name in ("fast", "python"):
        shown = defaults.get(named.replace(keys.ENTRY, name))
        if shown is not None:
            return f"`{shown}`"
    if key.field is None or key.field.is_required():
        return "required"
    return f"`{value_text(key.path, key.field.get_default(call_default_factory=True))}`"


def _meaning(key: keys.Key) -> str:
    parts = [meaning(key.path)]
    if key.field is not None:
        parts += _bounds(key.field)
    return " ".join(part for part in parts if part).replace("|", "\\|").replace("``", "`")


def _bounds(field: FieldInfo) -> Iterator[str]:
    least = greatest = None
    for item in field.metadata:
        least = getattr(item, "ge", least) if isinstance(item, annotated_types.Ge) else least
        greatest = item.le if isinstance(item, annotated_types.Le) else greatest
    options = getattr(field.annotation, "__args__", ())
    if options and all(isinstance(option, str) for option in options):
        yield f"One of {', '.join(f'`{option}`' for option in options)}."
    members = getattr(field.annotation, "__members__", {})
    if members:
        yield f"One of {', '.join(f'`{member.value}`' for member in members.values())}."
    if least is not None and greatest is not None:
        yield f"{least} to {greatest}."
    elif least is not None:
        yield f"At least {least}."
    elif greatest is not None:
        yield f"At most {greatest}."


if __name__ == "__main__":
    sys.exit(main())
