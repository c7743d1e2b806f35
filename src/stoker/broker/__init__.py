"""The ledger: a durable hand-off for every action, and the journal in the same transaction.

``base`` is the contract, ``core`` the pure decisions, ``service`` the verbs over a ``store``;
engines (memory, SQLite owner) differ only in their store and transport.
"""
