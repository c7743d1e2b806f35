"""Boxes: isolated places where actions run, with hard limits and teardown that leaves nothing.

``base`` is the contract; one file per backend. Nothing here knows rollouts or the ledger, so that
anybody's queue can use a box.
"""
