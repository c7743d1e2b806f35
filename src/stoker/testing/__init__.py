"""Shipped for users' tests as for ours: virtual clock, fakes, fault scripts."""
