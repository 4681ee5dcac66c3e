"""The OpenAPI document, made from the routes and the types that they read and write."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from muster import __version__
from muster.api.anthropic_shape import AnthropicDialect, ErrorReply
from muster.api.http import JSON, ApiRoute, Dialect, Operation
from muster.api.ollama_shape import ErrorReply as OllamaErrorReply
from muster.api.ollama_shape import OllamaDialect
from muster.api.openai_shape import ErrorBody, OpenAiDialect
from muster.api.own_errors import OwnDialect, OwnErrorReply

_Json = dict[str, Any]
_REFERENCE = "#/components/schemas/{name}"
_SIMPLE = {str: "string", int: "integer", bool: "boolean"}
_IN_PATH = re.compile(r"\{(\w+)(:\w+)?\}")

#: Each dialect's name in the document, and the body of its errors.
DIALECTS: dict[type[Any], tuple[str, type[msgspec.Struct]]] = {
    OwnDialect: ("muster", OwnErrorReply),
    OpenAiDialect: ("OpenAI", ErrorBody),
    AnthropicDialect: ("Anthropic", ErrorReply),
    OllamaDialect: ("Ollama", OllamaErrorReply),
}


def document(routes: Sequence[ApiRoute]) -> _Json:
    """The document of all routes, as OpenAPI 3.1."""
    types = list(dict.fromkeys(kind for route in routes for kind in _types(route)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, _Json] = {}
    for route in routes:
        path = _IN_PATH.sub(r"{\1}", route.operation.path)
        paths.setdefault(path, {})[route.operation.method.lower()] = _operation(route, known)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "muster",
            "version": __version__,
            "description": "Models over groups of MLX ranks, in the dialects of OpenAI, Anthropic and Ollama.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Either key, or none where the coordinator was started without one.
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _types(route: ApiRoute) -> Iterable[Any]:
    operation = route.operation
    wanted = (operation.body, operation.reply, operation.events, _dialect(route.served_by.dialect)[1])
    return (kind for kind in wanted if kind is not None)


def _dialect(dialect: Dialect) -> tuple[str, type[msgspec.Struct]]:
    return DIALECTS[type(dialect)]


def _operation(route: ApiRoute, known: dict[Any, _Json]) -> _Json:
    operation = route.operation
    name, error = _dialect(route.served_by.dialect)
    found: _Json = {
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip("_"),
        "summary": operation.summary,
        "tags": [name],
        "parameters": _parameters(operation),
        "responses": {
            str(operation.status): {"description": operation.summary, "content": _content(operation, known)},
            "default": {"description": "What went wrong.", "content": {JSON: {"schema": known[error]}}},
        },
    }
    if operation.body is not None:
        content = {JSON: {"schema": known[operation.body]}}
        found["requestBody"] = {"required": operation.body_required, "content": content}
    if route.served_by.public:
        found["security"] = []
    return found


def _content(operation: Operation, known: dict[Any, _Json]) -> _Json:
    content: _Json = {}
    if operation.reply is not None:
        content[JSON] = {"schema": known[operation.reply]}
    if operation.events is not None:
        content[operation.stream] = {"schema": known[operation.events]}
    return content


def _parameters(operation: Operation) -> list[_Json]:
    inside = [
        {"name": match[1], "in": "path", "required": True, "schema": {"type": "string"}}
        for match in _IN_PATH.finditer(operation.path)
    ]
    beside = [
        {
            "name": parameter.name,
            "in": parameter.place,
            "description": parameter.summary,
            "schema": {"type": _SIMPLE[parameter.kind]},
        }
        for parameter in operation.parameters
    ]
    return cast("list[_Json]", inside + beside)
