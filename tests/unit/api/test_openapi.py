"""The OpenAPI document: every route is in it, and it holds together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from serving import Served

from muster import __version__
from muster.api.app import build_app
from muster.api.settings import ApiSettings

_METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
#: Source: OpenAPI 3.1.0, "Components Object" and "Path Templating".
_COMPONENT = re.compile(r"^[a-zA-Z0-9._-]+$")


@pytest.fixture
def document(web: httpx.Client, server: Served) -> dict[str, Any]:
    response = web.get(f"{server.url}/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    expected = {
        (re.sub(r":\w+\}", "}", route.path), method.lower())  # pyright: ignore
        for route in build_app(FakeBackend(), ApiSettings()).routes
        for method in route.methods - {"HEAD"}  # pyright: ignore
    }
    assert {(path, method) for path, method, _ in operations(document)} == expected
    assert ("/v1/chat/completions", "post") in expected
    assert ("/api/instances/{instance}", "delete") in expected
    assert ("/api/nodes/{node}/drain", "post") in expected


def test_it_is_a_document_of_its_version(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert document["info"]["title"] == "muster"
    assert document["info"]["version"] == __version__
    assert set(document) <= {"openapi", "info", "paths", "components", "security", "tags", "servers"}
    assert {name for one in document["security"] for name in one} <= set(document["components"]["securitySchemes"])


def test_every_operation_says_what_it_takes_and_gives(document: dict[str, Any]) -> None:
    names: list[str] = []
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert method in _METHODS, where
        assert path.startswith("/"), where
        assert operation["summary"], where
        names.append(operation["operationId"])
        assert all(reply["description"] for reply in operation["responses"].values()), where
        assert all(re.fullmatch(r"[1-5]\d\d|default", status) for status in operation["responses"]), where
        success = [reply for status, reply in operation["responses"].items() if status.startswith("2")]
        assert all(reply["content"] for reply in success) and success, where
        assert ("requestBody" in operation) == (method == "post"), where
        inside = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
        assert inside == set(re.findall(r"\{(\w+)\}", path)), where
        assert all(one["required"] for one in operation["parameters"] if one["in"] == "path"), where
        assert all("type" in one["schema"] for one in operation["parameters"]), where
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    prefix = "#/components/schemas/"
    found = set(references(document))
    assert {reference for reference in found if not reference.startswith(prefix)} == set()
    assert {reference.removeprefix(prefix) for reference in found} == set(schemas), "unknown or unused schemas"
    assert all(_COMPONENT.match(name) for name in schemas)


def test_bodies_refuse_what_they_do_not_know(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path, _, operation in operations(document):
        if "requestBody" in operation:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            schema = schemas[reference.rpartition("/")[2]]
            assert schema["additionalProperties"] is False, path
            if schema.get("required"):
                assert operation["requestBody"]["required"], path
    assert not document["paths"]["/api/nodes/{node}/drain"]["post"]["requestBody"]["required"]


def test_streams_have_the_type_of_their_dialect(document: dict[str, Any]) -> None:
    def types(path: str) -> set[str]:
        return set(document["paths"][path]["post"]["responses"]["200"]["content"])

    assert types("/v1/messages") == {"application/json", "text/event-stream"}
    assert types("/v1/chat/completions") == {"application/json", "text/event-stream"}
    assert types("/api/chat") == {"application/json", "application/x-ndjson"}
    assert set(document["paths"]["/api/events"]["get"]["responses"]["200"]["content"]) == {"text/event-stream"}
