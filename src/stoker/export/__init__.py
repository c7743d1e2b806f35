"""Finished rollouts as training rows: one row per segment, as JSON lines or Parquet."""
