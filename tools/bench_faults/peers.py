"""Install the queues we are compared with in an environment of their own: ``make bench-peers``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bootstrap

VENV = bootstrap.ROOT / ".venv-peers"


def main() -> None:
    """Make ``.venv-peers``; does nothing where it is newer than its list."""
    wanted, stamp = Path(__file__).with_name("requirements.txt"), VENV / ".installed"
    if stamp.exists() and stamp.stat().st_mtime >= wanted.stat().st_mtime:
        return
    print("[stoker] to install: 450 MB of other queues and two servers, in .venv-peers", flush=True)
    bootstrap.make_venv(VENV)
    bootstrap.install("-r", str(wanted), venv=VENV, constraints=False)
    site = next((VENV / "lib").glob("python3*/site-packages"))
    (site / "bench_peers.pth").write_text(f"{bootstrap.ROOT / 'tools'}\n")  # for `-m bench_peers`
    stamp.touch()


if __name__ == "__main__":
    main()
