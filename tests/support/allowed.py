"""What the tidy test lets pass, each with its reason. An entry nobody needs any more fails too."""

OUTSIDE = {
    # (module, what it reaches for): why it may
    ("seams/", "time"): "the clock seam",
    ("seams/", "random"): "the entropy seam",
    ("rollout/randomness.py", "random"): "seeded generators: the point is to repeat them",
    ("config/load.py", "os.environ"): "the one reader of settings from the environment",
    ("worker/process.py", "os.environ"): "arms fault points when the process starts",
    ("rollout/host.py", "os.environ"): "reads the hash seed its process was started with",
    ("rollout/hosts.py", "os.environ"): "starts program hosts under a pinned hash seed",
    ("rollout/hosts.py", "create_subprocess_exec"): "owns the program host processes",
    ("coordinator/workers.py", "subprocess"): "owns the local worker processes",
    ("sandbox/maker_client.py", "subprocess"): "owns the privileged box maker",
    ("sandbox/maker.py", "os.fork"): "makes boxes",
    ("sandbox/maker.py", "os.execvpe"): "becomes the launcher of a box",
    ("cli/worker.py", "os.execv"): "the worker takes the command's process",
}

BOUNDARIES = {
    # module:function: why everything is caught there and not raised again
    "broker/exchange.py:Exchange.answer": "one bad request must not end the ledger",
    "cli/main.py:main": "the outermost boundary of the command line: a bug is shown whole",
    "coordinator/dispatch.py:Dispatcher._generate": "a backend's bug is one rollout's fault",
    "rollout/guard.py:close_guarded": "whatever cleanup raises must not hit the program",
    "worker/callrunner.py:main": "whatever the tool raised is its result",
}

ENTRY_POINTS = {
    "stoker.cli.main": "the installed command",
    "stoker.worker.main": "started with -m by coordinator and command line",
}
