"""Settings of worker classes: the boxes of a class, their limits, and what they can reach."""

import re
from typing import Annotated, Literal, Self

import msgspec
from pydantic import AfterValidator, Field, model_validator

from stoker.config.section import Section
from stoker.config.units import Duration, Size
from stoker.model.execution import (
    MEBIBYTE,
    Credential,
    Destination,
    ExecutionPolicy,
    Isolation,
    Limits,
    Mount,
    Trust,
    credential_problem,
)

_LABEL = "[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*|[0-9a-f]*:[0-9a-f:.]+")


class LimitSettings(Section):
    """Hard limits of a box."""

    cpu: Duration = 60.0
    """CPU time of one action, all processes together."""
    memory: Annotated[Size, Field(ge=4 * MEBIBYTE)] = 512 * MEBIBYTE
    """Memory of the box; in less than 4 MiB no shell starts."""
    processes: Annotated[int, Field(ge=1)] = 512
    """Processes and threads."""
    disk: Size = 256 * MEBIBYTE
    """Workspace, /tmp and /dev/shm each."""
    files: Annotated[int, Field(ge=1)] = 20_000
    """Inodes of each of those."""
    output: Size = MEBIBYTE
    """Kept bytes of each stream."""


class MountSettings(Section):
    """One host path visible in a box."""

    source: str
    """Absolute host path."""
    target: str
    """Absolute path in the box."""
    writable: bool = False
    """Read-only unless said."""


def _host(host: str) -> str:
    host = host.lower().removesuffix(".")
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"{host!r} is no host: give a DNS name or a numeric address, without port, scheme "
            "or wildcard"
        )
    return host


Host = Annotated[str, AfterValidator(_host)]


class DestinationSettings(Section):
    """Where the boxes of a class may connect to, by TLS."""

    host: Host
    """DNS name or numeric address; no wildcards."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 443
    """Port there."""
    private: bool = False
    """It may lie in a private network; never on the host itself or among cloud metadata."""


class CredentialSettings(Section):
    """A secret the boxes of a class may use without having it."""

    variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Environment variable that holds a placeholder."""
    host: Host
    """Host of one of the class's destinations."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 443
    """Its port."""
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] = "Authorization"
    """Header in which the egress proxy replaces the placeholder by the value."""
    file: Annotated[str, Field(pattern=r"^/")]
    """Absolute path on each worker's host; its one line is the value."""


class ServiceSettings(Section):
    """A remote service that actions use; workers that share a ledger share its rate."""

    rate: Annotated[float, Field(gt=0, le=1_000_000)]
    """Actions a second that may be handed out; a "too many requests" lowers it for a while."""
    burst: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Actions at once after a pause; unset: those of one second, at least 1."""


Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=60)]


class WorkerClassSettings(Section):
    """One kind of slot: its concurrency, deadlines, limits and isolation."""

    slots: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Actions at once on each worker; unset: one per core. With ``slots_max`` where it begins."""
    slots_min: Annotated[int, Field(ge=1, le=10_000)] = 1
    """With ``slots_max``: never fewer."""
    slots_max: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Adapt: more slots while they give more results, up to this; fewer when the host or the tools
    cannot bear them. Unset: ``slots`` is fixed."""
    isolation: Isolation = Isolation.AUTO
    """Boundary round its boxes."""
    trust: Trust = Trust.UNTRUSTED
    """Whether the work may be hostile."""
    timeout: Duration = 30.0
    """Wall time of one action, where the program names none."""
    deadline: Duration = 1800.0
    """Acceptance to terminal state, queueing included, where the program names none."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Executions at most, where the effect allows another."""
    service: str | None = None
    """The remote service its actions use, one of ``services``: no more of them are handed out than
    its rate allows. Unset: none that needs sparing."""
    baseline: str | None = None
    """What its environments begin with where the program asks for ``python``, the default.
    ``python-X.Y`` is the host's interpreter whatever stands here."""
    by_ticket: bool = False
    """A queue of your own hands its actions out (``stoker.tickets``); the run's workers leave them
    alone. For stateless tools: an environment belongs to one worker, its actions cannot travel."""
    ready: Annotated[int, Field(ge=0, le=1_000)] | None = None
    """Boxes that each worker makes ahead and keeps waiting, over all baselines in use; 0: none.
    They take memory; where that is short they go first. Unset: two, of boxes that take next to
    none (``process`` and ``namespace``, not ``warm``), and none ``by_ticket``."""
    ready_idle: Duration = 60.0
    """The boxes of a baseline that nobody asked for so long go."""
    warm: bool = False
    """Fork ``python`` actions from an interpreter that waits in the box (``namespace``, as root):
    quicker; programs of one box then share a hash seed. Elsewhere it changes nothing."""
    preload: Annotated[tuple[Module, ...], Field(max_length=32)] = ()
    """With ``warm``: modules that interpreter imports before it serves, so that importing them is
    quick. Where that cannot be done the worker says so and boxes serve without."""
    cuda: Literal["torch", "jax"] | None = None
    """With ``microvm`` on the worker's host: its boxes use the host's NVIDIA device by this
    framework, which must find it in the machine they are branched off. They share the device, so
    it is no boundary between tenants; they have neither branches nor checkpoints. Unset: none."""
    limits: LimitSettings = LimitSettings()
    """Hard limits of its boxes."""
    mounts: tuple[MountSettings, ...] = ()
    """Host paths visible in its boxes."""
    network: tuple[DestinationSettings, ...] = ()
    """Where its boxes may connect to, by TLS through the egress proxy; empty: nowhere."""

    credentials: tuple[CredentialSettings, ...] = ()
    """Secrets the egress proxy puts into requests of its boxes."""

    @model_validator(mode="after")
    def _credentials_have_destinations(self) -> Self:
        if problem := credential_problem(self.network, self.credentials):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _preload_is_warm(self) -> Self:
        if self.preload and not self.warm:
            raise ValueError("preload needs warm = true: only a waiting interpreter imports ahead")
        return self

    @model_validator(mode="after")
    def _cuda_is_of_machines(self) -> Self:
        if self.cuda is not None and self.isolation is not Isolation.MICROVM:
            raise ValueError('cuda needs isolation = "microvm": no other box reaches the device')
        return self

    @property
    def reaches_outside(self) -> bool:
        """Whether an action may leave something outside its box."""
        return bool(self.network) or any(mount.writable for mount in self.mounts)

    @model_validator(mode="after")
    def _bounds_hold(self) -> Self:
        start = self.slots if self.slots is not None else self.slots_min
        if self.slots_max is not None and not self.slots_min <= start <= self.slots_max:
            raise ValueError(
                f"slots_min, slots and slots_max are {self.slots_min}, {self.slots} and "
                f"{self.slots_max}; each must not be over the next"
            )
        return self

    def policy(self, *, accept_shared_kernel: bool) -> ExecutionPolicy:
        """Return the execution policy of this class."""
        return ExecutionPolicy(
            isolation=self.isolation,
            trust=self.trust,
            accept_shared_kernel=accept_shared_kernel,
            warm=self.warm,
            preload=self.preload or msgspec.UNSET,
            cuda=self.cuda or msgspec.UNSET,
            limits=Limits(
                cpu_seconds=self.limits.cpu,
                memory_bytes=self.limits.memory,
                processes_max=self.limits.processes,
                disk_bytes=self.limits.disk,
                files_max=self.limits.files,
                output_bytes=self.limits.output,
            ),
            mounts=tuple(
                Mount(source=m.source, target=m.target, writable=m.writable) for m in self.mounts
            ),
            credentials=tuple(Credential(**one.model_dump()) for one in self.credentials),
            network=tuple(
                Destination(host=d.host, port=d.port, private=d.private) for d in self.network
            ),
        )
