"""A box whose policy names destinations reaches those, by TLS, and nothing else (CASES A15)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.egress_world import SECRET
from support.sandbox import needs_root
from support.worlds import qemu_missing

GUEST = pytest.param(
    "guest",
    marks=[
        pytest.mark.slow,  # programs that speak TLS, on an emulated processor
        pytest.mark.skipif(bool(qemu_missing()), reason=f"guests of QEMU: {qemu_missing()}"),
    ],
)
WORLD = Path(__file__).parent.parent / "support" / "egress_world.py"


def certify(directory: Path) -> None:
    """Make the key and the certificate of the world's server."""
    if shutil.which("openssl") is None:
        pytest.skip("no certificate without openssl; apt-get install openssl")
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
            "-nodes", "-days", "2", "-subj", "/CN=pypi.org", "-addext",
            "subjectAltName=DNS:pypi.org,DNS:other.example,DNS:inward.example",
            "-keyout", str(key), "-out", str(certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip


@needs_root
@pytest.mark.parametrize("starts", ["fresh", "warm", GUEST])
def test_a_box_reaches_what_its_policy_names_and_nothing_else(tmp_path: Path, starts: str) -> None:
    certify(tmp_path)
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, str(WORLD), str(tmp_path), starts],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    inside = json.loads(seen["stdout"] or "{}")
    assert inside, seen["stderr"]

    assert seen["forked"] is (starts == "warm")
    assert seen["again"] == inside, "a second action of the box has a door of its own"
    assert inside["listed"] == "hello /simple"
    assert "403" in inside["unlisted"], "a name the policy does not list"
    assert "403" in inside["inward"], "a listed name that leads into a private network"
    assert "405" in inside["plain"], "a listed name without TLS"
    assert inside["direct"] == "Network is unreachable"
    assert inside["resolved"] == "no"
    assert inside["descriptors"] == [0, 1, 2], "the door's channel must not stay open"
    assert seen["missing"] == 127

    assert seen["uid"] >= 100_000, "the proxy has a uid of its own"
    assert seen["readable_by"] == 0, "its memory is not to be read, nor dumped"
    assert seen["killed"] == "BoxFailed", "a dead proxy is our fault, whatever the program printed"
    assert seen["stopped"] == "BoxFailed", (
        "one that does not answer is ended, and waited for no more"
    )
    assert seen["after_a_kill"] == "hello /simple", "the next action starts another proxy"
    assert seen["leaked"] == 0
    assert not Path(f"/proc/{seen['proxy']}").exists()
    assert seen["sent"] > 100
    assert seen["came"] > 100
    told = [tuple(decision[:4]) for decision in seen["decisions"][:4]]
    assert told == [
        ("box_out", True, "pypi.org", "93.184.216.34"),
        ("box_out", False, "other.example", ""),
        ("box_out", False, "inward.example", ""),
        ("box_out", False, "", ""),
    ]
    assert "private" in seen["decisions"][2][4]

    using = seen["using"]
    assert "token" in using, using["stderr"]
    right, elsewhere = [head for head in seen["received"] if "/echo" in head]
    assert f"Authorization: Bearer {SECRET}\r\n" in right
    assert SECRET not in elsewhere
    assert using["token"] in elsewhere, "only the named header gets the value"
    assert SECRET not in json.dumps(using), "what comes back is masked"
    assert "*" * len(SECRET) in using["right"]
    assert "502" in using["other_host"] or "403" in using["other_host"]
    assert [d[5] for d in seen["decisions"] if d[0] == "box_using" and d[1]] == ["TOKEN", ""]
