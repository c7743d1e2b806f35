"""Workers: lease, start, run in a box, complete; heartbeats that work cannot block."""
