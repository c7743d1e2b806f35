"""Models: one protocol towards whatever samples tokens.

``base`` is the contract; ``scripted`` and ``sim`` are shipped backends, servers and in-process
models follow. The lane (room ``coordinator``) decides when a call is issued; a model only answers.
"""
