"""Stoker: the rollout execution plane. Users import what they need from here."""

__version__ = "0.1.0"
