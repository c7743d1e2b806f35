"""Settings of boxes as a whole, and of what they begin with."""

import re
import sys
from typing import Annotated, Self

from pydantic import Field, model_validator

from stoker.config.section import Section
from stoker.config.units import Duration, Size
from stoker.model.execution import MEBIBYTE

_ONE_ROOT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,199}")
"""One name in a directory: it leads nowhere else."""


class BaselineSettings(Section):
    """A named starting state of environments."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Variables set in its boxes."""
    files: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path of a directory on each worker's host; its content is the workspace."""
    setup: tuple[str, ...] = ()
    """Shell lines run once per machine in a box with ``files``, without network unless the class
    has one; what they leave in the workspace is what environments begin with."""
    setup_timeout: Duration = 600.0
    """Wall time of each of them."""
    root: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path on each worker's host of an unpacked root file system, or of a saved container
    image (an OCI layout, its tar, or what ``docker save`` wrote): its boxes see that instead of
    the host's interpreter and system directories. Empty: the host's. Nothing is ever fetched."""
    roots: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path of a directory of such roots. A program then asks for ``NAME/ONE``, and gets
    the root called ``ONE`` or ``ONE.tar`` there: an image for each task."""

    packages: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path on each worker's host of a directory of Python packages (what
    ``pip install --target`` makes) or a virtual environment: its content, copied once, is the
    site-packages of the boxes, read-only. Empty: they have the standard library."""

    @model_validator(mode="after")
    def _one_kind_of_root(self) -> Self:
        if self.root and self.roots:
            raise ValueError("root and roots are both given: name one root, or a directory of them")
        if self.packages and (self.root or self.roots):
            raise ValueError("packages are for the host's interpreter; a root brings its own")
        return self


class SmolSettings(Section):
    """Where machines of ``microvm`` boxes are made: on the worker's host, unless ``url`` is set."""

    url: Annotated[
        str, Field(pattern=r"^(https://|http://(127\.0\.0\.1|localhost)(:|$))[^?#@]*$|^$")
    ] = ""
    """Of a service that speaks smolfleet's API; its operator sees whatever is in the boxes. Empty:
    this host. No variable of the environment chooses it."""
    key_file: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path, on each worker's host, of the file with the account's key."""
    image: str = "debian:bookworm-slim"
    """OCI image that machines there begin with: it needs a shell and tar."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if bool(self.url) != bool(self.key_file):
            raise ValueError("url and key_file belong together: give both, or neither")
        return self


class SandboxSettings(Section):
    """Isolation as a whole."""

    accept_shared_kernel: bool = False
    """Allow untrusted code on the host's kernel (namespaces, containers). Recorded with the run."""
    uid_base: Annotated[int, Field(ge=100_000)] = 1_900_000_000
    """First of the uids leased to boxes (as root)."""
    uid_count: Annotated[int, Field(ge=1)] = 65_536
    """How many."""
    baselines: dict[str, BaselineSettings] = Field(
        default_factory=lambda: {"python": BaselineSettings()}
    )
    """Baselines by name. ``python-X.Y`` is ``python`` where that is the interpreter's version."""
    baselines_max: Size = 20 * 1024 * MEBIBYTE
    """Bytes that roots and built workspaces may take on a machine, for all runs of its user. The
    least recently used go first, none that a living box is made of. Nor may one root take more."""

    smol: SmolSettings = SmolSettings()
    """Smol Machines."""

    def baseline(self, name: str) -> BaselineSettings | None:
        """Return the baseline called ``name``, or ``None``.

        A program may pin the interpreter (``python-3.11``), or name one of a directory of roots.
        """
        pinned = f"python-{sys.version_info.major}.{sys.version_info.minor}"
        family, _, one = name.partition("/")
        found = self.baselines.get(
            "python" if name == pinned and name not in self.baselines else family
        )
        if found is None or (not one and not found.roots):
            return found
        if not found.roots or not _ONE_ROOT.fullmatch(one):
            return None
        return found.model_copy(update={"root": f"{found.roots}/{one}", "roots": ""})
