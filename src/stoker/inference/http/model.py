"""``http:``: a model made of servers; see the package.

Figures of load are our own calls' (exact for them); what a server says about itself, all its
callers together, is beside them. Started before it is used: ``info`` needs the servers' answers.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from stoker.config.tree import ModelSettings
from stoker.errors import ConfigInvalid, ModelUnavailable
from stoker.inference.account import CallAccount
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo, Weights
from stoker.inference.continuing import is_aborted
from stoker.inference.http import control
from stoker.inference.http.addresses import server_name
from stoker.inference.http.replica import Replica, ToolReading
from stoker.inference.http.watch import Watch
from stoker.inference.http.weights import policy_version
from stoker.model.generation import GenerateRequest, Generation, LogprobKind

_ROUTES = {"vllm": {"completions", "generate"}, "sglang": {"generate"}}
"""What ``model.api`` may say of ids, by flavour."""
_BY_IDS = {"completions", "generate"}


class HttpModel:
    """A model served by one or several servers, each a replica."""

    def __init__(self, urls: tuple[str, ...], settings: ModelSettings) -> None:
        self._settings = settings
        reading = ToolReading()
        self.replicas = tuple(
            Replica(url, index, settings, reading) for index, url in enumerate(urls)
        )
        self._accounts = tuple(CallAccount() for _ in urls)
        self._watches = tuple(
            Watch(replica, lambda account=account: account.running)  # type: ignore[misc]
            for replica, account in zip(self.replicas, self._accounts, strict=True)
        )
        self._watching: list[asyncio.Task[None]] = []
        self._info: ModelInfo | None = None
        self._all_paused = False
        self._held = False
        """Paused by ourselves."""
        self._paused: Callable[[], None] = lambda: None
        self._resumed: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Reach every server, learn what it offers and begin to watch it.

        Raises:
            ConfigInvalid: one of them cannot be used as configured; nothing is left open.
        """
        try:
            done = await asyncio.gather(
                *(replica.start() for replica in self.replicas), return_exceptions=True
            )
            for problem in done:
                if isinstance(problem, BaseException):
                    raise problem  # noqa: TRY301 - closes what was opened
            self._info = _info(self.replicas, self._settings)
        except BaseException:
            await self.close()
            raise
        loop = asyncio.get_running_loop()
        self._watching = [loop.create_task(self._watch(watch)) for watch in self._watches]

    def info(self) -> ModelInfo:
        """Return what it is, as found when it was started."""
        assert self._info is not None, "start the model first"
        return self._info

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample one completion on ``replica``.

        Raises:
            ModelUnavailable: not reached, busy, broken, aborted, or an answer that makes no sense.
            ModelRefused: the server refuses the call as it is.

        **Cancellation:** the connection is closed and the server aborts.
        """
        account = self._accounts[replica]
        account.begun()
        try:
            generation = await self.replicas[replica].generate(request)
        except ModelUnavailable:
            self._watches[replica].hurry()
            raise
        finally:
            account.ended()
        if is_aborted(generation):
            self._watches[replica].hurry()
        account.answered(request, generation)
        return generation

    async def interrupt(self) -> None:
        """Let the servers abort our calls, those of others untouched; see ``Interrupting``."""
        done = await asyncio.gather(
            *(replica.interrupt() for replica in self.replicas), return_exceptions=True
        )
        for problem in done:
            if isinstance(problem, BaseException):
                raise problem

    def load(self, replica: int) -> DeviceLoad:
        """Return what our calls did there, and what the server last said about itself."""
        watch = self._watches[replica]
        said = watch.load
        return msgspec.structs.replace(
            self._accounts[replica].load(),
            kv_used_share=said.kv_used_share if said is not None else 0.0,
            preemptions=watch.preemptions,
            server=said,
        )

    def watch_pauses(self, paused: Callable[[], None], resumed: Callable[[], None]) -> None:
        """Call ``paused`` when every replica is paused, ``resumed`` when one is no longer."""
        self._paused, self._resumed = paused, resumed
        if self._all_paused:
            paused()

    async def look(self) -> None:
        """Look at every server now instead of waiting for the next look."""
        await asyncio.gather(*(self._look(watch) for watch in self._watches))

    async def pause(self, mode: control.Mode = "wait") -> None:
        """Pause every server and hold new calls; see ``control``.

        Raises:
            ConfigInvalid: a server does not offer it; all of them are resumed.
            ModelUnavailable: a server cannot be reached; all of them are resumed.
        """
        self._held = True
        self._tell()
        try:
            await control.pause(self.replicas, mode)
        except BaseException:
            await self._released()
            raise

    async def resume(self) -> None:
        """Let every server sample again and issue calls again; raises as ``pause``."""
        await control.resume(self.replicas)
        self._held = False
        await self.look()
        self._tell()

    async def update_weights(
        self, version: str, *, folder: str | None = None, mode: control.Mode = "wait"
    ) -> None:
        """Pause, load the weights named ``version``, resume; resumes whatever happens.

        Raises:
            ConfigInvalid: a server does not offer it.
            ModelUnavailable: a server cannot be reached.
        """
        await self.pause(mode)
        try:
            await control.reload(self.replicas, version, folder)
        except BaseException:
            await self._released()
            raise
        await self.resume()

    async def take_policy(self, version: int, weights: Weights) -> None:
        """Hold calls in flight where they are, load, go on; raises as ``update_weights``.

        A function is called while the servers are paused: it transfers the weights its own way.
        """
        if not callable(weights):
            await self.update_weights(str(version), folder=str(weights), mode="keep")
            return
        await self.pause("keep")
        try:
            await weights()
            await control.rename(self.replicas, str(version))
        except BaseException:
            await self._released()
            raise
        await self.resume()

    async def _released(self) -> None:
        """Resume after a failure, which is what the caller must hear of."""
        with suppress(ConfigInvalid, ModelUnavailable):
            await control.resume(self.replicas)
        self._held = False
        await self.look()
        self._tell()

    async def close(self) -> None:
        """Stop watching and close every connection."""
        for task in self._watching:
            task.cancel()
        if self._watching:
            await asyncio.wait(self._watching)
        self._watching = []
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    async def _watch(self, watch: Watch) -> None:
        while True:
            await self._look(watch)
            await watch.rest(self._settings.scrape)

    async def _look(self, watch: Watch) -> None:
        await watch.look()
        self._tell()

    def _tell(self) -> None:
        paused = self._held or all(one.paused for one in self._watches)
        if paused is not self._all_paused:
            self._all_paused = paused
            (self._paused if paused else self._resumed)()


def _info(replicas: tuple[Replica, ...], settings: ModelSettings) -> ModelInfo:
    names = {replica.offer.name for replica in replicas}
    if len(names) > 1:
        raise ConfigInvalid(
            f"the model servers serve different models: {', '.join(sorted(names))}; nothing was "
            "started. Replicas of one run serve one model; choose it with --set model.name=…"
        )
    for replica in replicas:
        _require(replica, settings)
    kinds = {replica.logprob_kind for replica in replicas}
    return ModelInfo(
        name=f"http:{names.pop()}",
        replicas=tuple(
            ReplicaInfo(
                replica=replica.index,
                window=settings.window,
                kv_tokens=replica.offer.kv_tokens,
                server=server_name(replica.link.url),
            )
            for replica in replicas
        ),
        logprob_kind=kinds.pop() if len(kinds) == 1 else LogprobKind.NONE,
        simulated=False,
        policy_version=policy_version(replicas[0].weights.version),
        notices=tuple(notice for replica in replicas for notice in _notices(replica, settings)),
    )


def _require(replica: Replica, settings: ModelSettings) -> None:
    """Hold what is configured against what the server offers.

    Raises:
        ConfigInvalid: they do not fit.
    """
    offer, url = replica.offer, replica.link.url
    if settings.api in _BY_IDS - _ROUTES.get(offer.flavour, set()):
        raise ConfigInvalid(
            f"model.api={settings.api} is not for a server of flavour {offer.flavour} ({url}); "
            "nothing was started. completions is vLLM's, generate is SGLang's and vLLM's; auto "
            "chooses"
        )
    if settings.api == "generate" and offer.flavour == "vllm" and not offer.scale_out:
        raise ConfigInvalid(
            f"model server {url} does not take model.api=generate; nothing was started. Start vLLM "
            "with --enable-scale-out, or use model.api=auto"
        )
    if settings.api in _BY_IDS and not offer.takes_ids:
        raise ConfigInvalid(
            f"model server {url} takes or renders no token ids (/tokenize with messages), which "
            f"model.api={settings.api} needs; nothing was started. Use model.api=auto"
        )
    if settings.require_token_ids == "refuse" and not _gives_ids(replica, settings):  # noqa: S105 - a choice
        raise ConfigInvalid(
            f"model server {url} gives no token ids: {_LOST}; nothing was started. Use vLLM or "
            "SGLang with return_token_ids, or go on without: --set model.require_token_ids=degrade"
        )


_LOST = (
    "what was sampled could not be shown to the model again exactly, and the record would hold no "
    "ids, log-probabilities or policy versions to train on"
)

_ANEW = (
    "cannot continue a history by its ids (it has no /tokenize for messages, or takes no ids): "
    "every turn is rendered anew and may begin a segment."
)


def _gives_ids(replica: Replica, settings: ModelSettings) -> bool:
    if settings.api in _BY_IDS:
        return replica.offer.takes_ids
    return replica.offer.token_ids


def _notices(replica: Replica, settings: ModelSettings) -> tuple[str, ...]:
    if not _gives_ids(replica, settings):
        return (f"{replica.link.url} gives no token ids: {_LOST}.",)
    if settings.api == "auto" and not replica.offer.takes_ids:
        return (f"{replica.link.url} {_ANEW}",)
    return ()
