"""The settings tree as JSON Schema, for editors and for programs that write settings.

Beside what pydantic says: durations and sizes are numbers or texts with a unit (``x-unit`` names
the plain number's), and entries that exist by default are shown as defaults.
"""

import copy
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticUndefined, core_schema

from stoker.config import units
from stoker.config.tree import Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"
UNIT = "x-unit"

_QUANTITIES: dict[Any, tuple[str, str, str]] = {
    units.seconds: ("number", "seconds", "ms|s|m|h|d"),
    units.size_bytes: ("integer", "bytes", "B|KiB|MiB|GiB|TiB"),
}


class _Generator(GenerateJsonSchema):
    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        function: object = schema["function"]["function"]
        if function not in _QUANTITIES:
            return super().function_before_schema(schema)
        kind, unit, suffixes = _QUANTITIES[function]
        text = rf"^\s*([0-9]*\.?[0-9]+)\s*({suffixes})\s*$"
        number = {"type": kind, "exclusiveMinimum": 0}
        return {"anyOf": [number, {"type": "string", "pattern": text}], UNIT: unit}

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ANN401 - pydantic's signature
        """Names need no second spelling."""
        del schema
        return False


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema of a settings file: every key with unit, default and meaning."""
    schema = Settings.model_json_schema(schema_generator=_Generator)
    parts = schema.get("$defs", {}) | {Settings.__name__: schema}
    for model in _models(Settings):
        properties = parts[model.__name__]["properties"]
        for name, field in model.model_fields.items():
            properties[name].pop("gt", None)  # of a quantity: said in its schema's own words
            if field.default is PydanticUndefined and field.default_factory is not None:
                default = field.get_default(call_default_factory=True, validated_data={})
                properties[name]["default"] = _plain(default)
    return {"$schema": DIALECT, **schema, "title": "Settings of Stoker"}


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += _models(kind)
    return found


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return copy.copy(value)
