"""Every setting, with its unit, default and meaning. Unknown keys are refused.

Durations accept ``"30s"``, ``"5m"`` or seconds; sizes accept ``"512MiB"`` or bytes (``units``).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stoker.config.boxes import SandboxSettings
from stoker.config.classes import ServiceSettings, WorkerClassSettings
from stoker.config.secret import Secret
from stoker.config.section import Section
from stoker.config.units import Duration, Size
from stoker.model.execution import MEBIBYTE

WORKER_CLASS_DEFAULT = "fast"


class RunSettings(Section):
    """The run as a whole."""

    group_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Rollouts per task."""
    spare: Annotated[int, Field(ge=0, le=1024)] = 0
    """More rollouts of each task than ``group_size``: the first that end by themselves make the
    group, the others are cancelled as stragglers. What is kept is shorter than what was begun;
    the run says by how much."""
    branches_max: Annotated[int, Field(ge=0, le=65_536)] = 64
    """Rollouts that programs may branch off one rollout (``ctx.branch``), theirs included."""
    seed: int = 0
    """Seed of the whole run."""
    task_limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first so many tasks."""


class LedgerSettings(Section):
    """The durable hand-off."""

    directory: str | None = None
    """Ledger, artifacts and workers that several runs share; unset: the run has its own."""
    durability: Literal["power-safe", "process-safe", "replicated"] = "power-safe"
    """Whether replies wait for the disk, or for a PostgreSQL standby's too."""
    url: Secret | None = None
    """PostgreSQL database that holds the ledger, ``postgresql://user@host/database``; unset: SQLite
    in the run's directory. Passwords belong in ``~/.pgpass``: this address is kept without one."""
    db_schema: str = "stoker"
    """Schema of that database; runs that name the same share one ledger."""
    gateways: tuple[str, ...] = ()
    """Addresses (``host:port``) of ``stoker gateway`` processes that serve the ledger; the first
    that answers is used. Unset: the ledger is served on this machine."""
    gateway_key: str | None = None
    """The key file of those gateways (``stoker gateway --new-key``), readable by you alone."""
    lease: Duration = 10.0
    """A worker silent for this long loses its leases."""
    queued_max: Annotated[int, Field(ge=1)] = 100_000
    """Queued and leased actions; more are parked."""
    results_max: Annotated[int, Field(ge=1)] = 10_000
    """Results not yet applied, plus leases."""
    outstanding_per_rollout_max: Annotated[int, Field(ge=1)] = 256
    """Actions of one rollout that are not finished."""
    queued_per_run_max: Annotated[int, Field(ge=1)] | None = None
    """Queued and leased actions of one run, where several share a ledger; unset: no quota."""
    leased_per_run_max: Annotated[int, Field(ge=1)] | None = None
    """Actions of one run in workers' hands at once; unset: no quota."""
    idle_exit: Duration = 60.0
    """The owner process ends after this long without a connection."""

    @model_validator(mode="after")
    def _replicas_need_a_server(self) -> Self:
        if self.durability == "replicated" and self.url is None and not self.gateways:
            raise ValueError("durability = replicated needs a PostgreSQL server: set ledger.url")
        return self

    @model_validator(mode="after")
    def _gateways_need_a_key(self) -> Self:
        if self.gateways and self.gateway_key is None:
            raise ValueError("gateways need the key they were started with: set ledger.gateway_key")
        return self


class WorkerSettings(Section):
    """The local workers ``stoker run`` starts."""

    count: Annotated[int, Field(ge=0, le=64)] = 1
    """Worker processes started by the run; 0: started by hand with ``stoker worker``."""
    reserve_cores: Annotated[float, Field(ge=0)] = 0.5
    """Cores boxes together leave to coordinator and host, where cgroups allow."""
    reserve_memory: Size = 512 * MEBIBYTE
    """Memory boxes together leave to coordinator and host."""
    idle_exit: Duration = 60.0
    """A local worker ends after this long without a coordinator."""
    classes: dict[str, WorkerClassSettings] = Field(
        default_factory=lambda: {WORKER_CLASS_DEFAULT: WorkerClassSettings()}
    )
    """Worker classes by name."""
    environment_class: str = WORKER_CLASS_DEFAULT
    """Class of ``ctx.environment`` where the program names none."""
    call_class: str = WORKER_CLASS_DEFAULT
    """Class of ``ctx.call`` where the program names none."""

    @property
    def ticket_classes(self) -> tuple[str, ...]:
        """Classes that are handed out by ticket, in order of name."""
        return tuple(sorted(name for name, one in self.classes.items() if one.by_ticket))

    @model_validator(mode="after")
    def _classes_exist(self) -> "WorkerSettings":
        for key in ("environment_class", "call_class"):
            if getattr(self, key) not in self.classes:
                raise ValueError(
                    f"{key} is {getattr(self, key)!r}, which is none of {sorted(self.classes)}"
                )
        if self.classes[self.environment_class].by_ticket:
            raise ValueError(
                f"environment_class {self.environment_class!r} is by_ticket: an environment "
                "belongs to one worker, so no other queue can hand its actions out; name another "
                "class for environments"
            )
        return self


class ProgramSettings(Section):
    """Program hosts."""

    hosts: Annotated[int, Field(ge=1, le=64)] = 2
    """Host processes; more contain a stuck program better, they are not for speed."""
    stuck: Duration = 2.0
    """A program that holds its host for this long moves to quarantine; its host is ended."""
    check_replays: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of finished rollouts replayed once more to find nondeterminism early."""


class AdmissionSettings(Section):
    """How many rollouts are active at once."""

    mode: Literal["adaptive", "fixed"] = "adaptive"
    """``adaptive`` follows the lane; ``fixed`` keeps ``active_max``."""
    active_max: Annotated[int, Field(ge=1)] = 512
    """Never more than this."""
    active_start: Annotated[int, Field(ge=1)] = 16
    """Where ``adaptive`` begins."""
    boxes_max: Annotated[int, Field(ge=1)] = 256
    """Boxes reserved by active rollouts together; each partition of a divided run has its share."""


class LaneSettings(Section):
    """The inference lane."""

    retries: Annotated[int, Field(ge=0, le=100)] = 4
    """Tries after the first, on other replicas where there are some."""
    retry_delay: Duration = 0.2
    """Before the first retry; doubles, with jitter."""
    call_timeout: Duration = 600.0
    """Of one model call."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """This run's share of model servers beside those of other runs on the same ledger."""


class TorchSettings(Section):
    """Models in this process (``--model torch:…``), on the CPU."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and KV cache; ``auto``: the faster one, by timing a step of each."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Cores a step uses; unset: half of them, since boxes and programs need the others."""
    kv_memory: Size = 2048 * MEBIBYTE
    """KV cache, shared evenly by ``model.window`` sequences; bounds how long each may get."""


class ModelSettings(Section):
    """Model servers (``--model http://…``) and ``torch:``; others have files of their own."""

    name: str | None = None
    """Served model name; unset: the one the server serves."""
    window: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Calls in flight on each replica, which batches them."""
    flavour: Literal["auto", "vllm", "sglang", "openai"] = "auto"
    """Whose server it is; ``openai`` is any other: chat only."""
    api: Literal["auto", "completions", "chat", "generate"] = "auto"
    """``auto``: a chat first, exact token ids from then on where the server takes them;
    ``completions`` (vLLM) and ``generate`` (SGLang; vLLM with ``--enable-scale-out``, whose answers
    say which weights sampled which token): token ids in every turn; ``chat``: never."""
    require_token_ids: Literal["refuse", "degrade"] = "refuse"  # noqa: S105 - a choice, no password
    """A server that gives no exact token ids is refused, or used without them and said so."""
    logprobs: Literal["auto", "raw", "sampled", "none"] = "auto"
    """Which kind the server gives (before or after temperature); ``none``: do not ask for them.
    ``auto``: raw for vLLM (its ``--logprobs-mode``), sampled for SGLang."""
    tool_calls: Literal["auto", "text", "server"] = "auto"
    """Who reads tool calls out of later turns: we, from the text, or the server, by chat.
    ``auto``: we, unless the server finds calls that we do not."""
    history: Literal["append", "rerender"] = "append"
    """``append``: a turn's prompt goes on from exactly the ids that were sampled, for as long as
    the template shows the past as it did; ``rerender``: the template renders the whole history in
    every turn (it drops earlier thinking, say), and a turn whose ids differ begins a segment."""
    priority: bool = False
    """Send the order of rollouts as priority (vLLM with ``--scheduling-policy priority``)."""
    api_key: Secret | None = None
    """Sent as bearer token."""
    start: Duration = 5.0
    """How long a server may take to answer the first question."""
    scrape: Duration = 2.0
    """Between two looks at a server's metrics, weights and pause."""
    torch: TorchSettings = TorchSettings()
    """A model in this process."""


class TrainingSettings(Section):
    """A trainer that embeds the run (``stoker.start_run``); a resume may change any of it."""

    unread_max: Annotated[int, Field(ge=1)] = 64
    """While so many complete groups wait for the trainer to read, no new group is begun."""
    staleness_max: Annotated[int, Field(ge=0)] | None = None
    """A rollout with tokens of a policy more than so many published versions back is truncated;
    unset: none is."""


class StorageSettings(Section):
    """What runs may leave on the disk."""

    artifacts_max: Size | None = None
    """Bytes of stored content, checkpoints among it, at which a run drains; unset: no budget. Make
    room with ``stoker runs prune``."""
    url: Annotated[str, Field(pattern=r"^s3://[^/@?#]+(/[^@?#]*)?$")] | None = None
    """``s3://BUCKET/PREFIX``: where checkpoints of environments go as well, so that a worker that
    shares no disk begins with them (``stoker[s3]``). Credentials and region come from the usual
    ``AWS_`` variables of the worker. Unset: the run's directory alone. What lies there is never
    removed by a run; give the prefix an expiry."""
    endpoint: Annotated[str, Field(pattern=r"^https?://[^/@?#]+$")] | None = None
    """``https://HOST:PORT`` of a store that is compatible; unset: Amazon's."""


class BudgetSettings(Section):
    """What a run may cost, all its rollouts and resumptions together; a resume may change it."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens sampled; unset: no budget. Each partition of a divided run has its share of it, as of
    the others."""
    box_seconds: Annotated[Duration, Field(gt=0)] | None = None
    """Time that actions run in boxes, added up; unset: no budget."""
    money: Annotated[float, Field(gt=0)] | None = None
    """In the currency of the prices; unset: no budget."""
    token_price: Annotated[float, Field(ge=0)] = 0.0
    """Of a million sampled tokens, what their prompts cost included."""
    box_price: Annotated[float, Field(ge=0)] = 0.0
    """Of an hour in which an action runs."""
    spent: Literal["finish", "truncate"] = "finish"
    """What becomes of active rollouts once a budget is spent; no other is begun, and the run can
    be resumed with a larger one."""

    @model_validator(mode="after")
    def _money_has_prices(self) -> Self:
        if self.money is not None and not self.token_price and not self.box_price:
            raise ValueError("budget.money needs budget.token_price or budget.box_price: set one")
        return self


class ObserveSettings(Section):
    """Metrics and logs."""

    metrics_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """Prometheus port of the coordinator on loopback; 0: any free one; unset: none. Partition *i*
    of a divided run takes the port + *i*."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line kept in the run's log."""


class Settings(Section):
    """The whole tree."""

    run: RunSettings = RunSettings()
    ledger: LedgerSettings = LedgerSettings()
    workers: WorkerSettings = WorkerSettings()
    services: dict[str, ServiceSettings] = Field(default_factory=dict)
    """Remote services by name, which worker classes refer to."""
    sandbox: SandboxSettings = SandboxSettings()
    program: ProgramSettings = ProgramSettings()
    admission: AdmissionSettings = AdmissionSettings()
    lane: LaneSettings = LaneSettings()
    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    storage: StorageSettings = StorageSettings()
    budget: BudgetSettings = BudgetSettings()
    observe: ObserveSettings = ObserveSettings()

    @model_validator(mode="after")
    def _baselines_exist(self) -> Self:
        for name, one in self.workers.classes.items():
            if one.baseline is not None and self.sandbox.baseline(one.baseline) is None:
                raise ValueError(
                    f"workers.classes.{name}.baseline is {one.baseline!r}, which is none of "
                    f"{sorted(self.sandbox.baselines)}; add [sandbox.baselines.{one.baseline}]"
                )
        return self

    @model_validator(mode="after")
    def _services_exist(self) -> Self:
        for name, one in self.workers.classes.items():
            if one.service is not None and one.service not in self.services:
                raise ValueError(
                    f"workers.classes.{name}.service is {one.service!r}, which is none of "
                    f"{sorted(self.services)}; give it a rate: services.{one.service}.rate"
                )
        return self
