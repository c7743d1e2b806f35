"""Whether boxes can reach this host's NVIDIA device through the SDK's remoting of CUDA calls.

Calls of a machine's programs are made by a process of the host, on the device all such machines
share. That process and the driver stand between them and the host, and no kernel of their own: it
is **no boundary between tenants**, and only for work whose author is trusted with the device.
"""

import ctypes.util
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
REMEDY = "leave cuda out of the worker class, or use a host whose NVIDIA driver is loaded"


def driver_missing() -> str:
    """Return what of the driver this host lacks, in a few words; empty: nothing."""
    if not DRIVER.exists():
        return f"no NVIDIA driver is loaded ({DRIVER} is not there)"
    if not any(DEVICES.glob("nvidia[0-9]*")):
        return f"the NVIDIA driver has no device in {DEVICES}"
    if ctypes.util.find_library("cuda") is None:
        return "the driver's library libcuda.so.1 is not installed"
    return ""


def trial(framework: str) -> str:
    """Return a line of Python that says ``found`` where ``framework`` finds a device."""
    asked = {
        "torch": "torch.cuda.is_available()",
        "jax": "any(d.platform == 'gpu' for d in jax.devices())",
    }[framework]
    return f"import {framework}; print('found' if {asked} else 'no device')"
