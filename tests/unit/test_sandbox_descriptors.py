"""A child's descriptors get their numbers whatever numbers they had in the maker.

Found under load: with many children alive the error pipe had exactly the number it was to be given,
and ``dup2`` of a number onto itself is refused.
"""

import os
from pathlib import Path

import pytest

from stoker.sandbox import maker

TARGETS = [3, 5]


@pytest.mark.parametrize("number", [*range(3, 12), 500, 700])
def test_an_error_pipe_of_any_number_is_carried_over(number: int, tmp_path: Path) -> None:
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:
        said.write_text(_arranged(number))  # by name: every descriptor may have been replaced
        os._exit(0)
    os.waitpid(child, 0)
    assert said.read_text() == "arranged"


def _arranged(number: int) -> str:
    """Arrange in this (forked) process; every descriptor must then be the file it was."""
    try:
        files = [os.memfd_create(f"file {i}") for i in range(3 + len(TARGETS))]
        # Move them out of the way, then give the error pipe the number under test.
        files = [os.dup2(file, 900 + i) for i, file in enumerate(files)]
        errors = os.memfd_create("errors")
        if errors != number:
            os.dup2(errors, number)
            os.close(errors)
        names = [str(Path(f"/proc/self/fd/{file}").readlink()) for file in files]
        final = maker._arrange(files, TARGETS, number)
        found = [str(Path(f"/proc/self/fd/{target}").readlink()) for target in [0, 1, 2, *TARGETS]]
        same = found == names and "errors" in str(Path(f"/proc/self/fd/{final}").readlink())
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return "arranged" if same else f"{found} instead of {names}"
