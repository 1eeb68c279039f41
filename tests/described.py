"""Answers, held to the description of the API: nothing that it does not tell of, and all that it tells of."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from streaming import events

ROOT_URI = "urn:openapi"
JSON, EVENTS = "application/json", "text/event-stream"
NO_OPERATION = {404: "NotFound", 405: "MethodNotAllowed"}


class Description:
    """An OpenAPI document by which answers can be judged.

    What an answer is made of has no other properties than those described; where the document itself leaves that open,
    for clients that meet a newer server, it is closed here.
    """

    def __init__(self, document: Any) -> None:
        self.document = deepcopy(document)
        self._bodies = set(_body_schemas(self.document))
        for name, schema in self.document["components"]["schemas"].items():
            if "properties" in schema and name not in self._bodies:
                schema["additionalProperties"] = False
        contents: Any = Resource.from_contents(self.document, default_specification=DRAFT202012)
        self._registry: Any = Registry().with_resource(ROOT_URI, contents)

    def errors(self, schema: Any, value: Any) -> list[str]:
        """What of a value is not as a schema of this document has it."""
        validator = Draft202012Validator(_absolute(schema), registry=self._registry)
        return [f"{'/'.join(map(str, error.path))}: {error.message[:300]}" for error in validator.iter_errors(value)]

    def request_errors(self, method: str, path: str, body: Any) -> list[str]:
        """What of a body is not as its operation has it."""
        return self.errors(self.operation(method, path)["requestBody"]["content"][JSON]["schema"], body)

    def operation(self, method: str, path: str) -> Any:
        """The operation of a path that may be a pattern's instance."""
        parts = path.split("?")[0].split("/")
        for pattern, methods in self.document["paths"].items():
            expected = pattern.split("/")
            is_path = (
                expected[-1] == "{id}" and len(parts) >= len(expected) and parts[: len(expected) - 1] == expected[:-1]
            )
            if (pattern == path.split("?")[0] or is_path) and method.lower() in methods:
                return methods[method.lower()]
        return None

    def response(self, method: str, path: str, status: int) -> Any:
        """What is said of an operation's answer with this status."""
        operation = self.operation(method, path)
        if operation is None:
            return self.document["components"]["responses"][NO_OPERATION[status]]
        assert str(status) in operation["responses"], f"{method} {path} is not described with {status}"
        response = operation["responses"][str(status)]
        if "$ref" in response:
            return self.document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        return response

    def check(self, method: str, path: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Fail unless the answer is as described: its status, headers, kind and body, and each event of a stream."""
        if method == "OPTIONS" and status == 200:
            assert "allow" in {name.lower() for name in headers}
            return
        response = self.response(method, path, status)
        given = {name.lower(): value for name, value in headers.items()}
        for name, header in response["headers"].items():
            value = given.get(name.lower())
            assert value is not None or not header.get("required"), f"{status} without {name}"
            if value is not None:
                typed: Any = int(value) if header["schema"]["type"] == "integer" else value
                assert self.errors(header["schema"], typed) == [], name
        kind = given["content-type"].partition(";")[0]
        assert kind in response["content"], f"{kind} is not described"
        schema = response["content"][kind]["schema"]
        if kind == JSON:
            assert self.errors(schema, json.loads(body)) == []
        elif kind == EVENTS:
            self.check_stream(schema, body.decode())

    def check_stream(self, schema: Any, text: str) -> None:
        """Fail unless each event is as described, and what each carries."""
        assert text.endswith("\n\n")
        told = events(text)
        assert told
        for number, (id, data) in enumerate(told):
            event = {"data": data} if id is None else {"id": id, "data": data}
            assert self.errors(schema, event) == []
            if data == "[DONE]":
                assert number == len(told) - 1
                continue
            carried = json.loads(data)
            wrong = [self.errors(kind, carried) for kind in _carried(self._resolved(schema))]
            assert [] in wrong, wrong
        assert told[-1][1] == "[DONE]" or "error" in json.loads(told[-1][1]), "the stream has no end"

    def examples(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Each example: where it is, the kind of its media, its schema and itself."""
        for where, content in _contents(self.document, ""):
            for kind, media in content.items():
                values = {name: example["value"] for name, example in media.get("examples", {}).items()}
                values |= {"": media["example"]} if "example" in media else {}
                for name, value in values.items():
                    yield f"{where} {kind} {name}", kind, media["schema"], value

    def _resolved(self, schema: Any) -> Any:
        """Without references to components at the top and in alternatives."""
        if "$ref" in schema:
            return self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            return {"anyOf": [self._resolved(choice) for choice in schema["anyOf"]]}
        return schema


def _carried(event: Any) -> Iterator[Any]:
    """The schemas of what the data of an event may hold."""
    for choice in event.get("anyOf", [event]):
        for data in choice["properties"]["data"]["anyOf"]:
            if "contentSchema" in data:
                yield data["contentSchema"]


def _absolute(schema: Any) -> Any:
    match schema:
        case {"$ref": str(reference), **rest}:
            return {"$ref": ROOT_URI + reference} | {name: _absolute(value) for name, value in rest.items()}
        case dict():
            return {name: _absolute(value) for name, value in schema.items()}
        case list():
            return [_absolute(item) for item in schema]
    return schema


def _body_schemas(document: Any) -> Iterator[str]:
    """The names of the schemas that bodies of requests consist of."""
    waiting = [
        operation["requestBody"]
        for methods in document["paths"].values()
        for operation in methods.values()
        if "requestBody" in operation
    ]
    while waiting:
        match waiting.pop():
            case {"$ref": str(reference)}:
                name = reference.rpartition("/")[2]
                yield name
                waiting.append(document["components"]["schemas"][name])
            case dict() as schema:
                waiting += schema.values()
            case list() as schemas:
                waiting += schemas


def _contents(part: Any, where: str) -> Iterator[tuple[str, Any]]:
    match part:
        case dict():
            for name, value in part.items():
                if name == "content" and isinstance(value, dict) and any("/" in kind for kind in value):
                    yield where, value
                elif name not in ("examples", "example"):
                    yield from _contents(value, f"{where}/{name}")
        case list():
            for number, item in enumerate(part):
                yield from _contents(item, f"{where}/{number}")
