"""Rollout programs: ordinary async functions made durable by replay, in processes of their own.

``context`` is what a program sees; ``trampoline`` drives it; ``host`` is the process;
``messages`` is what host and coordinator say to each other.
"""
