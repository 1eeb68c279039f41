"""From a request's bytes to a validated body; whatever is wrong becomes a 400 that names the field."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from shared.errors import ErrorCode, RequestError
from shared.settings import Limits

Body = TypeVar("Body", bound=BaseModel)

TYPE_NAMES = {
    "float_type": "a number",
    "int_type": "an integer",
    "bool_type": "a boolean",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
}

JSON_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}


SHOWN = 100
"""How much an error repeats of a field's name or value."""


def parse(raw: bytes, model: type[Body], *, no_op: Mapping[str, tuple[Any, ...]], limits: Limits) -> Body:
    """The body as a validated `model`, whose validators find `limits` in their context.

    A top-level null means the field's default. `no_op` names the fields that this server knows and
    does not honour, with the values that ask for nothing; any other value is refused.

    Raises:
        RequestError: `invalid_request` or `unsupported_parameter`.
    """
    given = {name: value for name, value in _json_object(raw).items() if value is not None}
    for name in given.keys() & no_op.keys():
        # `1 == True`, but a number is not a boolean here.
        if not any(value == given[name] and type(value) is type(given[name]) for value in no_op[name]):
            raise RequestError(
                ErrorCode.UNSUPPORTED_PARAMETER, f"'{name}' is not supported yet by this server.", param=name
            )
        del given[name]
    try:
        return model.model_validate(given, context=limits)
    except ValidationError as error:
        raise _request_error(error.errors(include_url=False)[0]) from error


def invalid(reason: str, *, param: str | None = None) -> PydanticCustomError:
    """What a validator raises: why the value is refused, and which field it is if not the validated one."""
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "param": param})


def unsupported(what: str) -> PydanticCustomError:
    """What a validator raises for a value that asks for something this server does not do."""
    return PydanticCustomError("unsupported", "{what}", {"what": what})


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"We could not parse the JSON body of your request: {error}"
        ) from error
    if not isinstance(body, dict):
        raise RequestError(ErrorCode.INVALID_REQUEST, "The body of the request must be a JSON object.")
    return body


def _request_error(detail: ErrorDetails) -> RequestError:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    param = context.get("param") or _param(detail["loc"])
    if kind == "unsupported":
        message = f"Invalid '{param}': {detail['msg']} is not supported yet by this server."
        return RequestError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
    if kind == "refused":
        message = f"Invalid '{param}': {detail['msg']}"
    elif kind == "missing":
        message = f"Missing required parameter: '{param}'."
    elif kind == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {param}"
    elif kind in TYPE_NAMES:
        got = JSON_TYPES.get(type(value), "null")
        message = f"Invalid type for '{param}': expected {TYPE_NAMES[kind]}, but got {got} instead."
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}[kind]
        bound = next(iter(context.values()))
        message = f"Invalid '{param}': {str(value)[:SHOWN]} is out of range. Expected a value {sign} {bound}."
    else:
        message = f"Invalid '{param}': {detail['msg']}."
    return RequestError(ErrorCode.INVALID_REQUEST, message, param=param)


def _param(location: tuple[int | str, ...]) -> str | None:
    """The field as OpenAI names it: `messages[0].content`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")[:SHOWN] or None
