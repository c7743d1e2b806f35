"""Secrets: values that are used and never shown.

A ``Secret`` prints, formats, pickles into logs and serialises as dots; only ``reveal`` gives the
text. It does not protect memory; it keeps the text out of everything that is written down.
"""

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

DOTS = "••••••"


class Secret:
    """A text that prints as dots."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text itself; for the one place that needs it."""
        return self._text

    def __repr__(self) -> str:
        return DOTS

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(DOTS, spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled; hand it over by name")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401 - pydantic's signature
        """Accept text or a secret; serialise as dots, so that no dump of settings holds it."""
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Say in a schema that it is given as text and not shown again."""
        return {"type": "string", "format": "password", "writeOnly": True}

    @classmethod
    def _validated(cls, value: object) -> "Secret":
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            return cls(value)
        raise ValueError("a secret is given as text")
