"""The record of every rollout: artifacts by content address, and journals read back as turns."""
