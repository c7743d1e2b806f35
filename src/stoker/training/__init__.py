"""A run inside a trainer: complete groups out, commits, state and policies in (design 0013)."""
