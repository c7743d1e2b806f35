"""The nouns every room shares: immutable records that cross process borders and disks.

Nothing here does input or output. Every record is a frozen ``msgspec.Struct``, so that one
definition is the type, the validator and the wire format. Names follow ``docs/glossary.md``.
"""
