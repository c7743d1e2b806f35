"""The way out of a box whose policy names destinations: a proxy that carries nothing else.

``addresses``, ``hello``, ``proxy`` and ``main`` run as a process of their own, from a copy, with
the standard library alone; ``gate`` is the worker's side of it.
"""
