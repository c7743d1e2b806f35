"""What every system is given to run: jobs that leave a line when they begin and when they act."""

import ctypes
import os
import signal
import sys
import time

PAUSE_SECONDS = 3.0
"""Between beginning and acting, or acting and ending: room to be hit in."""
LONG_SECONDS = 40.0
"""Of a job that is to be cancelled: long enough for the slowest client to say so."""


def mark(what: str, key: str) -> None:
    """Write one line, whole, to the log that is counted."""
    descriptor = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{what} {key}\n".encode())
    os.close(descriptor)


def job(kind: str, key: str) -> None:
    """Do one job; its effect is the line ``acted``."""
    mark("begun", key)
    if kind == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "gil":  # a C call that never lets go of the interpreter
        held = 2 * float(os.environ["BENCH_LEASE"])
        ctypes.PyDLL(None).usleep(int(held * 1e6))
    if kind == "before":
        time.sleep(PAUSE_SECONDS)
    if kind == "long":
        time.sleep(LONG_SECONDS)
    mark("acted", key)
    if kind == "after":
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    job(*sys.argv[1:3])
