"""What a request says, in the form the kernel takes it: arguments, variables, a directory.

Whatever cannot be said so is the caller's to mend: ``ToolRefused``, and nothing was run.
"""

import os
from collections.abc import Mapping, Sequence

from stoker.errors import ToolRefused


def base_environment(python: str, *, home: str, temporary: str) -> dict[str, str]:
    """Return the variables every program gets; nothing of the host's."""
    return {
        "PATH": f"{python}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def encoded(environment: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return variables as the kernel takes them.

    Raises:
        ToolRefused: a name or value cannot be a variable.
    """
    found = {}
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise ToolRefused(f"{name!r} cannot be an environment variable; nothing was run")
        found[os.fsencode(name)] = os.fsencode(value)
    return found


def encoded_argv(argv: Sequence[str]) -> list[bytes]:
    """Return arguments as the kernel takes them.

    Raises:
        ToolRefused: one holds a NUL or cannot be encoded.
    """
    try:
        found = [os.fsencode(a) for a in argv]
    except UnicodeEncodeError as error:
        raise ToolRefused(f"an argument cannot be encoded ({error}); nothing was run") from error
    if any(b"\0" in a for a in found):
        raise ToolRefused("an argument holds a NUL character; nothing was run")
    return found


def inside_directory(directory: str) -> str:
    """Return a working directory relative to the workspace, refused where it leaves it."""
    if directory.startswith("/") or ".." in directory.split("/") or "\0" in directory:
        raise ToolRefused(f"the directory {directory!r} leaves the workspace; nothing was run")
    return directory
