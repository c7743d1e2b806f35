"""How fast this processor's counter of ticks runs: an emulated guest counts by it, and is told.

Without being told a guest would take its seconds for longer or shorter than they are, and so its
time limits. Neither ``/proc`` nor ``/sys`` says it on every host, so it is measured.
"""

import ctypes
import mmap
import time
from functools import cache

_READ_COUNTER = bytes.fromhex("0f3148c1e2204809d0c3")
"""rdtsc; shl rdx, 32; or rax, rdx; ret."""
_SECONDS = 0.1


@cache
def kilohertz() -> int:
    """Return thousands of ticks per second; takes a tenth of a second, once."""
    with mmap.mmap(
        -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    ) as page:
        page.write(_READ_COUNTER)
        held = ctypes.c_char.from_buffer(page)
        counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(held))
        began, first = time.monotonic_ns(), counter()
        time.sleep(_SECONDS)
        ticks: int = counter() - first
        spent = time.monotonic_ns() - began
        del held
    return round(ticks / (spent / 1e6))
