"""Other queues, each doing what a cycle of ours does, for ``stoker bench ledger``.

Runs in ``.venv-peers`` (``make bench-peers``), where nothing of Stoker is installed.
"""
