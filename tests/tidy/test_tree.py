"""What must not be in the tree: where it was made, and where its packages came from."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from support.source import ROOT, broken, tracked_texts

MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:work/|root/\.(?:pyenv|cache|local|venv)|home/(?!user\b|you\b|me\b)[a-z]\w*/)"
)
REGISTRY_HOSTS = re.compile(
    r"https?://[^/\s\"']*(?:artifactory|nexus|devpi|verdaccio|mirror|proxy|\.internal|\.corp)\b",
    re.IGNORECASE,
)
CONFLICT = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)


def test_no_machine_paths() -> None:
    # This file spells them as patterns.
    broken(
        f"{path}: {match[0]}"
        for path, text in tracked_texts()
        if path != Path(__file__).relative_to(ROOT)
        for match in [MACHINE_PATHS.search(text)]
        if match
    )


def test_no_registry_hosts() -> None:
    configured = [re.escape(host) for host in configured_indexes()]
    hosts = re.compile("|".join([REGISTRY_HOSTS.pattern, *configured]), re.IGNORECASE)
    broken(
        f"{path}: {match[0]}"
        for path, text in tracked_texts()
        if path != Path(__file__).relative_to(ROOT)
        for match in [hosts.search(text)]
        if match
    )


def test_no_conflict_marks_and_no_stray_endings() -> None:
    broken(f"{path}: conflict marks" for path, text in tracked_texts() if CONFLICT.search(text))
    broken(f"{path}: carriage returns" for path, text in tracked_texts() if "\r\n" in text)
    broken(
        f"{path}: does not end with a line feed"
        for path, text in tracked_texts()
        if text and not text.endswith("\n")
    )


def configured_indexes() -> set[str]:
    """Return hosts of the package indexes this machine is told to use."""
    places = [Path("~/.config/pip/pip.conf"), Path("~/.pip/pip.conf"), Path("/etc/pip.conf")]
    texts = [value for name, value in os.environ.items() if "INDEX" in name]
    texts += [p.expanduser().read_text() for p in places if p.expanduser().is_file()]
    urls = [url for text in texts for url in re.findall(r"https?://[^\s\"',]+", text)]
    return {host for url in urls if (host := urlsplit(url).hostname)} - {"localhost", "127.0.0.1"}
