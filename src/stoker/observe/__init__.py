"""Seeing it: one catalogue of metric names, log lines, and the causes of idle seconds."""
