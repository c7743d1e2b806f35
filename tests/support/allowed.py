"""What the tidy test lets pass, each with its reason. An entry nobody needs any more fails too."""

OUTSIDE = {
    # (module, what it reaches for): why it may
    ("seams/", "time"): "the clock seam",
    ("seams/", "random"): "the entropy seam",
    ("testing/step_program.py", "time"): "a program that holds its host on purpose, for the bench",
    ("rollout/randomness.py", "random"): "seeded generators: the point is to repeat them",
    ("config/load.py", "os.environ"): "the one reader of settings from the environment",
    ("worker/process.py", "os.environ"): "arms fault points when the process starts",
    ("broker/owner.py", "os.environ"): "arms fault points; finds the user's runtime directory",
    ("broker/owner.py", "os.fork"): "becomes a daemon that outlives the coordinator",
    ("broker/spawn.py", "subprocess"): "owns the start of the ledger's owner",
    ("inference/in_process/smollm2.py", "os.environ"): "finds the user's cache directory",
    ("rollout/host.py", "os.environ"): "reads the hash seed its process was started with",
    ("rollout/hosts.py", "os.environ"): "starts program hosts under a pinned hash seed",
    ("rollout/hosts.py", "create_subprocess_exec"): "owns the program host processes",
    ("coordinator/workers.py", "subprocess"): "owns the local worker processes",
    ("sandbox/maker_client.py", "subprocess"): "owns the privileged box maker",
    ("sandbox/maker.py", "os.fork"): "makes boxes",
    ("sandbox/maker.py", "os.execvpe"): "becomes the launcher of a box",
    ("cli/bench_boxes.py", "subprocess"): "starts its peer, and the holder of boxes it kills",
    ("cli/bench_ledger.py", "subprocess"): "starts its peer",
    ("cli/bench_soak.py", "subprocess"): "starts the runs it hurts, as they are typed",
    ("cli/bench_soak.py", "random"): "a plan of blows that its seed repeats",
    ("cli/worker.py", "os.execv"): "the worker takes the command's process",
}

BOUNDARIES = {
    # module:function: why everything is caught there and not raised again
    "broker/exchange.py:Exchange.run": "one bad request must not end the ledger",
    "broker/owner.py:_serve": "whatever it was, the process ends and the next owner reopens",
    "cli/main.py:main": "the outermost boundary of the command line: a bug is shown whole",
    "coordinator/dispatch.py:Dispatcher._generate": "a backend's bug is one rollout's fault",
    "inference/in_process/thread.py:EngineThread._step": "ends the calls of the step, not the run",
    "inference/in_process/thread.py:EngineThread.do.doing": "raised again where it is awaited",
    "inference/tokens/packaged.py:_tried": "per-model code of a package meets arbitrary ids",
    "rollout/guard.py:_abandoned": "whatever cleanup raises must not hit the program",
    "rollout/host.py:main": "the process ends here and says why",
    "rollout/host.py:run_local": "whatever a local function raises is its result",
    "rollout/score.py:_shown": "a repr of the program's own class may raise",
    "rollout/trampoline.py:Trampoline._put": "bytes from outside may decode to anything",
    "rollout/trampoline.py:Trampoline._step": "a program may raise anything",
    "rollout/trampoline.py:_close_guarded": "whatever cleanup raises, the coroutine must end",
    "sandbox/inside/judge_main.py:_run": "whatever ends the check is a failure of the answer",
    "sandbox/inside/solution_server.py:_called": "whatever the answer raises is its doing",
    "sandbox/inside/solution_server.py:_raised": "the answer's exception may have a hostile str",
    "sandbox/inside/solution_server.py:main": "whatever loading the answer raises is its doing",
    "testing/conformance.py:_capabilities": "a foreign engine may raise anything",
    "testing/conformance.py:_tried": "a foreign engine may raise anything",
    "tickets/publisher.py:Publisher._publish": "a client of any queue may raise anything",
    "tickets/thread.py:TicketThread._serve": "what a start raises is raised in the caller's thread",
    "worker/batches.py:Batcher._one": "every waiter of a batch gets its failure",
    "worker/boxes.py:Boxes._tear_down": "a failed removal is counted as a leak, whatever it was",
    "worker/callrunner.py:call": "whatever the tool raised is its result",
    "worker/executor.py:Executor._collected": "the worker outlives a full disk",
    "worker/executor.py:Executor.execute": "the worker outlives any tool",
}

ENTRY_POINTS = {
    "stoker.cli.main": "the installed command",
    "stoker.worker.main": "started with -m by coordinator and command line",
}
