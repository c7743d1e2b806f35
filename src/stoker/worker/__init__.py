"""Workers: processes that lease actions and carry them out in boxes.

A worker holds slots per class, keeps its leases alive from a loop no work can block, kills its own
boxes when it has been out of contact for too long, and sweeps what a dead incarnation left. Work
runs in boxes, which are other processes; nothing of a tool ever runs in this one.
"""
