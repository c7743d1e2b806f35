"""The program host: a process that runs many rollouts of one program, one step at a time.

``python -m stoker.rollout.host --socket FD --stuck SECONDS --parent PID``; started by ``hosts``.
A plain loop on one socket: no event loop of its own that a program could reach. Messages of other
threads (watchdog, ``ctx.local``) go out as whole frames under a lock. The process ends with its
parent, with its socket, or when told; it never runs interpreter shutdown, so no ``finally`` of a
program runs by accident.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import io
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stoker.errors import (
    InternalError,
    LocalRaised,
    NonDeterministicRollout,
    ProgramInvalid,
    StokerError,
    VerbMisused,
    WireViolation,
)
from stoker.model.faults import FaultRecord
from stoker.model.ids import CallPath, RolloutId
from stoker.model.value import canonical_bytes
from stoker.rollout.log import LogStream
from stoker.rollout.messages import (
    Deliver,
    Differed,
    Evict,
    Loaded,
    LoadFailed,
    LoadProgram,
    LocalDone,
    ProgramOutcome,
    StartRollout,
    StopHost,
    Stuck,
    ToHost,
    Turn,
)
from stoker.rollout.operation import VerbOperation
from stoker.rollout.program import Rollout, load_program
from stoker.rollout.trampoline import Trampoline
from stoker.rollout.watchdog import Step, Watchdog
from stoker.seams.clock import Clock, SystemClock
from stoker.seams.faultpoints import arm, declare, end, reach, tears
from stoker.wire.frames import PROTOCOL_VERSION, FrameDecoder, Hello, frame

LOADED = declare("host.loaded", "a program is loaded and nobody has been told")
MESSAGE = declare("host.message", "a message has come and nothing of it was done")
TURN_BEFORE = declare("host.turn.before", "a program has taken its turn and nobody knows")
TURN_SEND = declare("host.turn.send", "the bytes of a turn are about to leave", "torn")
TURN_AFTER = declare("host.turn.after", "a turn has left")
LOCAL_BEFORE = declare("host.local.before", "a local function has run and nobody knows")

_READ_BYTES = 256 * 1024
_PR_SET_PDEATHSIG = 1
_LOCAL_THREADS = 16
LOCAL_BYTES_MAX = 32 * 1024 * 1024
"""Encoded result of one ``ctx.local``."""
_LOAD_SECONDS = 60.0
"""A program whose top level runs longer cannot be loaded."""
_LOADING = RolloutId("")
"""In place of a rollout while the program is being loaded."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToHost | Hello] = msgspec.msgpack.Decoder(ToHost | Hello)


class Sending(Protocol):
    """The way to the coordinator."""

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``."""
        ...


class Link:
    """The socket to the coordinator: whole frames out from any thread, messages in on one."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send ``message``; a coordinator that is gone ends the process at the next read."""
        encoded = frame(_encoder.encode(message))
        with self._lock, contextlib.suppress(OSError):
            if isinstance(message, Turn) and tears(TURN_SEND):
                encoded = encoded[: len(encoded) // 2]
            self._sock.sendall(encoded)
            end(TURN_SEND)

    def messages(self) -> Iterator[ToHost | Hello]:
        """Yield messages until the coordinator closes."""
        frames = FrameDecoder()
        while data := self._sock.recv(_READ_BYTES):
            for document in frames.feed(data):
                yield _decoder.decode(document)


class Host:
    """The rollouts of one process."""

    def __init__(
        self,
        link: Sending,
        stuck_seconds: float,
        *,
        clock: Clock | None = None,
        threads: Executor | None = None,
    ) -> None:
        """``threads`` run what ``ctx.local`` is given; by default some of this process."""
        self._link = link
        self._rollouts: dict[RolloutId, Trampoline] = {}
        self._program: Rollout | None = None
        self._threads = threads or ThreadPoolExecutor(_LOCAL_THREADS, thread_name_prefix="local")
        self._watchdog = Watchdog(stuck_seconds, clock or SystemClock(), self._tell_stuck)

    def run(self, messages: Iterator[ToHost | Hello]) -> None:
        """Watch, and serve until the coordinator closes or says stop."""
        self._watchdog.start()
        self._link.send(Hello(protocol=PROTOCOL_VERSION, role="host"))
        for message in messages:
            if isinstance(message, StopHost):
                return
            reach(MESSAGE)
            self.handle(message)

    def handle(self, message: ToHost | Hello) -> None:
        """Do what the coordinator says; what comes of it is sent before this returns."""
        match message:
            case Hello():
                if message.protocol != PROTOCOL_VERSION:
                    raise WireViolation(f"the coordinator speaks protocol {message.protocol}")
            case LoadProgram():
                self._load(message)
            case StartRollout():
                self._start(message)
            case Deliver():
                self._deliver(message)
            case Evict():
                self._evict(message.rollout_id)
            case StopHost():
                pass

    def _load(self, message: LoadProgram) -> None:
        try:
            with self._stepping(_LOADING, message.path, _LOAD_SECONDS):
                stands_for = Path(message.stands_for) if message.stands_for else None
                program = load_program(Path(message.path), message.name, stands_for=stands_for)
            digest = program.source_digest()
        except (ProgramInvalid, OSError) as error:
            self._link.send(LoadFailed(message=str(error)))
            return
        reach(LOADED)
        hash_seed = int(os.environ.get("PYTHONHASHSEED", "0"))
        self.take(program, digest, hash_seed=hash_seed, pid=os.getpid())

    def take(self, program: Rollout, digest: str, *, hash_seed: int, pid: int) -> None:
        """Run rollouts of ``program`` from now on, and say so."""
        self._program = program
        self._link.send(
            Loaded(
                name=program.name,
                version=program.version,
                source_digest=digest,
                python=".".join(platform.python_version_tuple()[:2]),
                hash_seed=hash_seed,
                boxes=program.boxes,
                timeout_seconds=program.timeout_seconds,
                pid=pid,
            )
        )

    def _start(self, start: StartRollout) -> None:
        assert self._program is not None, "the program is loaded first"
        self._evict(start.rollout_id)
        trampoline = Trampoline(self._program, start)
        self._rollouts[start.rollout_id] = trampoline
        with self._stepping(start.rollout_id, trampoline.program.file):
            try:
                turn = trampoline.begin()
            except NonDeterministicRollout as error:
                self._rollouts.pop(start.rollout_id)
                trampoline.close()
                self._link.send(Differed(rollout_id=start.rollout_id, fault=error.record()))
                return
        self._tell(trampoline, turn)

    def _deliver(self, message: Deliver) -> None:
        trampoline = self._rollouts.get(message.rollout_id)
        if trampoline is None:
            error = InternalError(
                f"this host has no rollout {message.rollout_id}; please report it"
            )
            outcome = ProgramOutcome(fault=error.record())
            self._link.send(Turn(rollout_id=message.rollout_id, outcome=outcome))
            return
        with self._stepping(message.rollout_id, trampoline.program.file):
            turn = trampoline.deliver(message)
        self._tell(trampoline, turn)

    def _tell(self, trampoline: Trampoline, turn: Turn) -> None:
        reach(TURN_BEFORE)
        try:
            self._link.send(turn)
            reach(TURN_AFTER)
        except (WireViolation, ValueError, OverflowError) as error:
            fault = VerbMisused(f"what the program gave cannot be sent ({error}); it was ended")
            turn = Turn(rollout_id=turn.rollout_id, outcome=ProgramOutcome(fault=fault.record()))
            self._link.send(turn)
        if turn.outcome is not None:
            self._evict(turn.rollout_id)
            return
        if trampoline.start.checking:
            return
        for path, operation in trampoline.take_locals():
            self._threads.submit(self._run_local, trampoline, path, operation)

    def _evict(self, rollout_id: RolloutId) -> None:
        trampoline = self._rollouts.pop(rollout_id, None)
        if trampoline is not None:
            with self._stepping(rollout_id, trampoline.program.file):
                trampoline.close()

    def close(self) -> None:
        """Throw every rollout away, guarded: nothing of a program runs by accident later."""
        for rollout_id in list(self._rollouts):
            self._evict(rollout_id)

    @contextlib.contextmanager
    def _stepping(
        self, rollout_id: RolloutId, file: str, seconds: float | None = None
    ) -> Iterator[None]:
        self._watchdog.begins(rollout_id, file, seconds)
        try:
            yield
        finally:
            self._watchdog.ends()

    def _run_local(
        self, trampoline: Trampoline, path: CallPath, operation: VerbOperation[Any]
    ) -> None:
        value, fault = run_local(operation)
        reach(LOCAL_BEFORE)
        if not trampoline.evicting:
            rollout_id = trampoline.start.rollout_id
            self._link.send(LocalDone(rollout_id=rollout_id, path=path, value=value, fault=fault))

    def _tell_stuck(self, step: Step, seconds: float, where: str) -> None:
        if step.rollout_id == _LOADING:
            self._link.send(LoadFailed(message=f"loading took over {seconds:.0f} s, at {where}"))
            return
        self._link.send(Stuck(rollout_id=step.rollout_id, seconds=seconds, where=where))


def run_local(operation: VerbOperation[Any]) -> tuple[bytes | None, FaultRecord | None]:
    """Run the function of a ``ctx.local`` call; return its encoded result or its fault."""
    assert operation.local is not None, "only ctx.local calls are run here"
    function, arguments = operation.local
    try:
        value = canonical_bytes(function(*arguments))
        if len(value) > LOCAL_BYTES_MAX:
            raise LocalRaised(f"ctx.local returned {len(value)} bytes, over {LOCAL_BYTES_MAX}")  # noqa: TRY301 - the handler below is the boundary
        return value, None  # noqa: TRY300 - reads better beside its check
    except StokerError as error:
        return None, error.record()
    except BaseException as error:  # noqa: BLE001 - boundary: code of others
        name = getattr(function, "__qualname__", "function")
        fault = LocalRaised(f"ctx.local({name}) raised {type(error).__name__}: {error}")
        return None, fault.record()


def main(argv: list[str]) -> None:
    """Run a host; never returns."""
    parser = argparse.ArgumentParser(prog="stoker.rollout.host")
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--stuck", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(argv)
    _end_with(options.parent)
    arm(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to understand
    faulthandler.enable()
    sys.stdout = sys.stderr = LogStream(io.FileIO(2, "w", closefd=False))
    link = Link(socket.socket(fileno=options.socket))
    try:
        Host(link, options.stuck).run(link.messages())
    except BaseException:  # noqa: BLE001 - boundary: the process ends here, and says why
        faulthandler.cancel_dump_traceback_later()
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
