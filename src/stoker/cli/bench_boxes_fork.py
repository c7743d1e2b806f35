"""The peer of a warm action, a script of its own: for each line it is sent, one bare fork.

The fork goes into fresh process, mount, ipc and uts namespaces and runs the line as a program with
a pipe for its output; what it wrote is answered once it has ended.
Argument: a directory of packages; where numpy is there, it is imported before any fork.
"""

import ctypes
import importlib.util
import os
import sys

_NEW_PID = 0x20000000
_NEW_NAMESPACES = 0x20000 | 0x08000000 | 0x04000000


def main() -> None:
    """Fork as often as asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    sys.path.append(sys.argv[1])
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy")
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    while line := sys.stdin.buffer.readline():
        read, write = os.pipe()
        if libc.unshare(_NEW_PID):
            raise OSError(ctypes.get_errno(), "unshare")
        pid = os.fork()
        if pid == 0:
            os.dup2(write, 1)
            failed = libc.unshare(_NEW_NAMESPACES)
            exec(compile(line, "<line>", "exec"), {})  # noqa: S102 - the bench's own program
            sys.stdout.flush()
            os._exit(failed)
        libc.setns(own, _NEW_PID)
        os.close(write)
        with os.fdopen(read, "rb") as output:
            said = output.read()
        _, status = os.waitpid(pid, 0)
        assert status == 0, "the child could not take its namespaces"
        sys.stdout.buffer.write(said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
