"""Attacks on boxes, each run twice: with its defence off, where it must succeed, and in a box.

An attack is a program that prints ``possible`` when it got what it wanted. One that does not
succeed without its defence proves nothing (this kernel may refuse by itself, what it needs may be
missing) and is not counted. ``stoker bench attacks`` runs them all on ``namespace`` boxes of this
host; ``run.Attackers`` does it for programs.

Every program is bounded by itself and harms nothing where it succeeds.
"""
