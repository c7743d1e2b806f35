"""Helpers shared by tests; importable because pytest puts tests/ on the path."""
