"""``torch:``: one replica in this process; see the package.

Messages become ids by the renderer, ids are sampled by the engine on its thread, and what was
sampled is read by the renderer again. Figures of tokens are the engine's and exact; times are those
of our calls.
"""

import asyncio
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from stoker.config.tree import TorchSettings
from stoker.errors import ConfigInvalid, ModelRefused, ModelUnavailable
from stoker.inference.account import CallAccount
from stoker.inference.base import DeviceLoad, ModelInfo, ReplicaInfo, Weights
from stoker.inference.in_process.calibrate import BATCH, Times, load_fastest, measure
from stoker.inference.in_process.engine import Engine, Running
from stoker.inference.in_process.folder import check_folder
from stoker.inference.in_process.network import Network
from stoker.inference.in_process.smollm2 import smollm2_folder
from stoker.inference.in_process.thread import EngineThread
from stoker.inference.tokens.base import RenderedPrompt, Renderer
from stoker.model.generation import (
    FinishReason,
    GenerateRequest,
    Generation,
    LogprobKind,
)
from stoker.seams.clock import SystemClock


class TorchModel:
    """A model of a local folder (``None``: SmolLM2 from its wheel). ``start`` first."""

    def __init__(
        self,
        folder: Path | None,
        *,
        window: int,
        settings: TorchSettings,
        open_renderer: Callable[[Path], Renderer],
    ) -> None:
        self._folder = folder
        self._window = window
        self._settings = settings
        self._open_renderer = open_renderer
        self._rendering = threading.Lock()
        """Stop texts are looked for on the engine's thread, and tokenizers are not thread-safe."""
        self._account = CallAccount()
        self._clock = SystemClock()
        self._capacity = 0.0
        self._thread: EngineThread | None = None
        self._info: ModelInfo | None = None

    async def start(self) -> None:
        """Load the weights, choose the number format and begin to serve.

        Raises:
            ConfigInvalid: the folder cannot be used, or memory does not hold it.

        **Cancellation:** the thread ends after what it is at; ``close`` waits for it.
        """
        if self._thread is not None:
            return  # by whoever measured it before the run
        self._thread = EngineThread(self._clock)
        try:
            await self._thread.do(self._load)
        except BaseException:
            await self.close()
            raise

    def info(self) -> ModelInfo:
        """Return what it is."""
        assert self._info is not None, "a model is started before it is asked what it is"
        return self._info

    async def generate(self, replica: int, request: GenerateRequest) -> Generation:
        """Sample one completion.

        Raises:
            ModelUnavailable: a step failed, or the model is closed.
            ModelRefused: the template cannot render the history, or its ids are not this model's.

        **Cancellation:** the sequence is aborted and its slot free at the next step.
        """
        assert replica == 0
        begun = request.begun
        if begun is None:
            with self._rendering:
                prompt = self._renderer.prompt(request)
        else:
            prompt = RenderedPrompt(ids=array("i", begun.prompt_ids), rerendered=begun.rerendered)
        if prompt.ids and not 0 <= min(prompt.ids) <= max(prompt.ids) < self._network.vocabulary:
            raise ModelRefused(  # in a step it would take everybody else's call with it
                f"call {request.request_id} brings a token id this model does not have (it has "
                f"{self._network.vocabulary}); were they sampled by another model?",
                request_id=request.request_id,
            )
        left = self._network.context - len(prompt.ids)
        tokens_max = min(request.sampling.tokens_max, left)
        if tokens_max < 1:  # the end of a context is data, not a failure
            return _generation(prompt, None, "", FinishReason.LENGTH)
        sequence = self._sequence(prompt.ids, request, tokens_max)
        before = len(sequence.logprobs)
        self._account.begun()
        try:
            await self._started().run(sequence)
        finally:
            self._account.ended()
        if sequence.finish is FinishReason.ABORTED and len(sequence.logprobs) == before:
            raise ModelUnavailable(
                f"call {request.request_id} was ended before it sampled anything",
                request_id=request.request_id,
            )
        return self._read(prompt, sequence, request)

    async def interrupt(self) -> None:
        """End every call between two steps; each returns what it has; see ``Interrupting``."""
        thread = self._started()
        assert thread.engine is not None
        await thread.do(thread.engine.interrupt)

    def load(self, replica: int) -> DeviceLoad:
        """Return what was done so far."""
        assert replica == 0
        engine = self._started().engine
        assert engine is not None
        held = sum(sequence.computed for sequence in self._started().calls)
        return msgspec.structs.replace(
            self._account.load(),
            tokens_sampled=engine.tokens_sampled,
            tokens_prefilled=engine.tokens_prefilled,
            kv_used_share=held / (self._window * self._network.context),
            capacity_tokens_per_second=self._capacity,
        )

    async def update_weights(self, folder: Path, version: int) -> None:
        """Load the weights in ``folder`` and sample by them from the next step on, as ``version``.

        Sequences that run go on with the keys and values they have; their spans carry both
        versions. Nothing waits: steps go on while the new weights are read.

        Raises:
            ConfigInvalid: the folder is no whole model, or another one; nothing has changed.

        **Cancellation:** the old weights or the new ones are used, never a mixture.
        """
        check_folder(folder, tokenizer=False)
        dtype = self._network.dtype
        fresh = await asyncio.to_thread(Network.load, folder, dtype)

        def change() -> None:
            self._network.take_weights(fresh)
            engine = self._started().engine
            assert engine is not None
            engine.change_weights(version)

        await self._started().do(change)

    async def take_policy(self, version: int, weights: Weights) -> None:
        """Load a folder as ``update_weights`` does.

        Raises:
            ConfigInvalid: it is no folder of this model's; nothing has changed.
        """
        if callable(weights):
            raise ConfigInvalid(
                "torch: loads weights from a folder; give publish_policy its path; nothing changed"
            )
        await self.update_weights(Path(weights), version)

    async def close(self) -> None:
        """End the engine's thread; calls in flight fail."""
        if self._thread is not None:
            await self._thread.close()

    # --- a call --------------------------------------------------------------------------------

    def _sequence(self, ids: "array[int]", request: GenerateRequest, tokens_max: int) -> Running:
        stops = tuple(stop for stop in request.sampling.stop if stop)
        return Running(
            ids,
            tokens_max=tokens_max,
            temperature=request.sampling.temperature,
            seed=request.seed,
            stop_ids=self._renderer.stop_ids,
            stopped=(lambda sampled: self._is_stopped(sampled, stops)) if stops else None,
            begun=request.begun,
        )

    def _is_stopped(self, sampled: "array[int]", stops: tuple[str, ...]) -> bool:
        # A token is a byte at least, save one that is not shown or half a character.
        tail = sampled[-max(4 * len(stop.encode(errors="replace")) for stop in stops) - 4 :]
        with self._rendering:
            text = self._renderer.text(tail)
        return any(stop in text for stop in stops)

    def _read(
        self, prompt: RenderedPrompt, sequence: Running, request: GenerateRequest
    ) -> Generation:
        with self._rendering:
            reading = self._renderer.read(sequence.sampled, request)
        reason = sequence.finish
        if reason is FinishReason.STOP and reading.tool_calls:
            reason = FinishReason.TOOL_CALLS
        text = reading.text
        ends = [at for at in (text.find(stop) for stop in request.sampling.stop if stop) if at >= 0]
        generation = _generation(prompt, sequence, text[: min(ends)] if ends else text, reason)
        return msgspec.structs.replace(generation, tool_calls=reading.tool_calls)

    # --- on the engine's thread ------------------------------------------------------------------

    def _load(self) -> None:
        folder = self._folder if self._folder is not None else smollm2_folder()
        check_folder(folder)
        with self._rendering:
            self._renderer = self._open_renderer(folder)
        torch.set_num_threads(self._settings.threads or max(1, torch.get_num_threads() // 2))
        try:
            network, times = load_fastest(
                folder, self._settings.dtype, self._clock, min(self._window, BATCH)
            )
            full = times[0]
            if full.batch < self._window:
                full = measure(network, self._clock, self._window)
            network.open_slots(self._window, self._slot_tokens(network))
        except (MemoryError, RuntimeError) as error:
            raise ConfigInvalid(
                f"model folder {folder} could not be loaded and run ({error}); it may need more "
                "memory than there is"
            ) from error
        self._capacity = full.batch / full.decode
        name = "smollm2" if self._folder is None else folder.name
        self._serve(network, name, (self._notice(network, times),))

    def _serve(self, network: Network, name: str, notices: tuple[str, ...]) -> None:
        self._network = network
        self._info = ModelInfo(
            name=f"torch:{name}",
            replicas=(
                ReplicaInfo(
                    replica=0,
                    window=self._window,
                    kv_tokens=self._window * network.context,
                    kv_by_slot=True,
                ),
            ),
            logprob_kind=LogprobKind.SAMPLED,
            simulated=False,
            notices=notices,
        )
        thread = self._started()
        thread.engine = Engine(network, self._window, thread.ended)

    def _slot_tokens(self, network: Network) -> int:
        """Return how long a sequence may get; see ``model.torch.kv_memory``."""
        memory = self._settings.kv_memory // (self._window * network.bytes_per_token)
        return max(1, min(network.longest, memory))

    def _notice(self, network: Network, times: list[Times]) -> str:
        shown = ", ".join(
            f"{one.dtype} {one.prefill * 1e3:.0f} + {one.decode * 1e3:.0f} ms" for one in times
        )
        return (
            f"{network.dtype} on {torch.get_num_threads()} threads (a prompt of 128 tokens + "
            f"a step of {times[0].batch}: {shown}); {self._window} sequences of at most "
            f"{network.context:,} tokens (model.window, model.torch.kv_memory)"
        )

    def _started(self) -> EngineThread:
        assert self._thread is not None, "a model is started before it is used"
        return self._thread


def _generation(
    prompt: RenderedPrompt, sequence: Running | None, text: str, reason: FinishReason
) -> Generation:
    return Generation(
        text=text,
        finish_reason=reason,
        prompt_ids=prompt.ids.tobytes(),
        token_ids=sequence.sampled.tobytes() if sequence is not None else b"",
        logprobs=sequence.logprobs.tobytes() if sequence is not None else b"",
        logprob_kind=LogprobKind.SAMPLED,
        spans=tuple(sequence.versions) if sequence is not None else (),
        rerendered=prompt.rerendered,
    )
