"""Other queues, each doing what a cycle of ours does, for ``stoker bench ledger``.

Runs in ``.venv-peers`` (``make bench-peers``), where nothing of Stoker is installed.

Batches: ours submits, leases, completes and acknowledges whatever is ready in one request, as a
run's own coordinator and workers do. A peer uses what its documentation offers for the same:
Procrastinate defers in batches, Ray fetches many results by one call; Dramatiq and taskiq have
nothing that sends many messages at once (a Dramatiq ``group`` sends one after the other), so 32
threads or coroutines of the submitter keep theirs on the way.
"""
