"""One frozen configuration tree with the origin of every value.

``tree`` holds the settings, ``load`` reads them (defaults < TOML < ``STOKER_…`` < ``--set``). Apart
from ``seams`` nothing else in Stoker reads the environment.
"""
