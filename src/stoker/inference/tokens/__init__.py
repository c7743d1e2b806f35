"""Tokens: between messages and ids, per model, where no server does it for us.

A renderer makes the prompt of a call and reads what was sampled. ``base`` is the contract; it is
needed wherever an engine takes and gives ids: in-process models and trainers that own theirs.
"""
