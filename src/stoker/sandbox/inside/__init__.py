"""Scripts that run inside boxes: standard library only, never imported by a worker."""
