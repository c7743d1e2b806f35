"""Boxes that are machines of Smol Machines (``stoker[microvm]``)."""
