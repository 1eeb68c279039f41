"""The wire's types as JSON schemas: of a request's body what `parse` takes, of an answer what is written."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.inspect import Field, StructType
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from shared.settings import Limits

REF = "#/components/schemas/"
NULL = {"type": "null"}

BOUNDS = ("maximum", "maxItems", "maxLength", "maxProperties")
"""Keywords under which a field's schema may have a list: the names of limits, and numbers, of which the least holds."""

NOT_HONOURED = "Known, and not honoured: only what asks for nothing is taken."

Schema = dict[str, Any]


def request_schemas(
    model: type[BaseModel], *, no_op: Mapping[str, tuple[Any, ...]], limits: Limits
) -> dict[str, Schema]:
    """The body that `parse` takes with the same arguments, and what it consists of, by name."""
    schema = model.model_json_schema(ref_template=REF + "{model}", schema_generator=_WithoutTitles)
    parts: dict[str, Schema] = schema.pop("$defs", {})
    properties: Schema = schema["properties"]
    required = {name: properties.pop(name) for name in schema["required"]}
    schema["properties"] = required | {name: _or_null(property) for name, property in properties.items()}
    for name, values in no_op.items():
        schema["properties"][name] = {"description": NOT_HONOURED, "enum": [*values, None]}
    # Null counts as not given, be it of a field that nobody knows.
    schema["additionalProperties"] = NULL
    schemas: dict[str, Schema] = _with_limits(parts | {model.__name__: schema}, limits)
    return schemas


def answer_schemas(types: Sequence[Any]) -> dict[str, Schema]:
    """These structs, and what they consist of, by name. Whatever is not left out on purpose is always there."""
    _, schemas = msgspec.json.schema_components(types, ref_template=REF + "{name}")
    for struct in _structs(types):
        schema = schemas[struct.cls.__name__]
        schema.pop("title")
        schema["required"] = [field.encode_name for field in struct.fields if not _may_be_left_out(field)]
        for described in schema["properties"].values():
            # What the constructor fills in is nothing that a reader could leave to a default.
            described.pop("default", None)
    return schemas


class _WithoutTitles(GenerateJsonSchema):
    """A field's title is its name with capital letters."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - what pydantic calls
        return False


def _or_null(schema: Schema) -> Schema:
    if schema.get("default", ...) is None:
        del schema["default"]
    if NULL in schema.get("anyOf", ()):
        return schema
    said: Schema = {name: schema.pop(name) for name in ("default", "description", "examples") if name in schema}
    choices = schema.pop("anyOf", None) or [schema]
    return {"anyOf": [*choices, NULL], **said}


def _with_limits(schema: Any, limits: Limits) -> Any:
    match schema:
        case dict():
            return {
                name: min(getattr(limits, bound) if isinstance(bound, str) else bound for bound in value)
                if name in BOUNDS and isinstance(value, list)
                else _with_limits(value, limits)
                for name, value in schema.items()
            }
        case list():
            return [_with_limits(item, limits) for item in schema]
    return schema


def _structs(types: Sequence[Any]) -> list[StructType]:
    """The structs that types consist of, each once."""
    found: dict[type, StructType] = {}
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        match waiting.pop():
            case StructType(cls=cls) as struct if cls not in found:
                found[cls] = struct
                waiting += [field.type for field in struct.fields]
            case msgspec.inspect.UnionType(types=members):
                waiting += members
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.VarTupleType(item_type=item):
                waiting.append(item)
    return list(found.values())


def _may_be_left_out(field: Field) -> bool:
    """Whether its default is `UNSET`, of which msgspec only says that there is no other."""
    return not field.required and field.default is field.default_factory is msgspec.NODEFAULT
