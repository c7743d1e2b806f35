"""The command line: every command has ``--json`` on stdout; people read stderr."""
