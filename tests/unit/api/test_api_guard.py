"""Who may use the API: a key where one is set, and no page of another site in somebody's browser."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import msgspec
import pytest
from fake_backend import MODEL, FakeBackend
from serving import Served, served

from muster.api.app import build_app
from muster.api.guard import host_name
from muster.api.http import ApiRoute
from muster.api.settings import ApiSettings
from muster.replies import AnyReply, Created
from muster.spec import InstanceId

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPEC: dict[str, Any] = {"workload": {"type": "script", "path": "/x.py"}}
POSTS = {"/v1/chat/completions": CHAT, "/v1/messages": {**CHAT, "max_tokens": 5}, "/api/chat": CHAT}


def test_another_sites_page_may_change_nothing_and_ask_nothing(
    web: httpx.Client, server: Served, backend: FakeBackend
) -> None:
    for path, body in [*POSTS.items(), ("/api/instances", SPEC)]:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"):
            response = web.post(server.url + path, json=body, headers={"origin": origin})
            assert response.status_code == 403, (path, origin)
            assert origin in response.text
            assert "access-control-allow-origin" not in response.headers
    assert web.delete(f"{server.url}/api/instances/x", headers={"origin": "https://evil.example"}).status_code == 403
    assert web.options(f"{server.url}/api/instances", headers={"origin": "https://evil.example"}).status_code in {
        403,
        405,
    }
    assert (backend.requests, backend.calls) == ([], [])


def test_its_own_pages_may(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    for path, body in POSTS.items():
        web.post(server.url + path, json=body, headers={"origin": server.url}).raise_for_status()
    assert len(backend.requests) == 3


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_an_instance_is_created_only_by_what_says_that_it_is_json(
    web: httpx.Client, server: Served, backend: FakeBackend, kind: str | None
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = web.post(f"{server.url}/api/instances", content=msgspec.json.encode(SPEC), headers=headers)
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]
    assert backend.calls == []


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:5713", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_a_name_that_was_made_to_point_here_is_refused(web: httpx.Client, server: Served, host: str) -> None:
    for path in ("/api/state", "/v1/models", "/api/tags"):
        response = web.get(server.url + path, headers={"host": host})
        assert response.status_code == 403
        assert "--http-name" in response.text


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:5713", "[::1]:5713", "10.1.2.3", socket.gethostname()],
)
def test_its_own_names_are_accepted(web: httpx.Client, server: Served, host: str) -> None:
    assert web.get(f"{server.url}/api/models", headers={"host": host}).status_code == 200


def test_further_names_can_be_given(web: httpx.Client, backend: FakeBackend) -> None:
    with served(backend, ApiSettings(names=("Proxy.example",))) as server:
        assert web.get(f"{server.url}/api/models", headers={"host": "proxy.example:443"}).status_code == 200
        own = {"host": "proxy.example", "origin": "https://proxy.example"}
        assert web.post(f"{server.url}/api/chat", json=CHAT, headers=own).status_code == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a:1", "a"),
        ("A.B.:1", "a.b"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("", ""),
        ("127.0.0.1", "127.0.0.1"),
        ("[::1].evil.com", "[::1].evil.com"),
    ],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        ("x-nothing", ""),
        ("authorization", "Bearer wrong"),
        ("authorization", "Basic sesame"),
        ("authorization", "sesame"),
        ("x-api-key", "wrong"),
        ("x-api-key", "schlüssel"),
    ],
)
def test_without_the_key_only_health_answers(web: httpx.Client, backend: FakeBackend, header: tuple[str, str]) -> None:
    sent = [(header[0].encode(), header[1].encode())]
    with served(backend, ApiSettings(api_key="sesame")) as server:
        for route in routes(backend):
            url = server.url + route.operation.path.replace("{instance:path}", "x").replace("{name:path}", "x")
            response = web.request(route.operation.method, url, headers=sent)
            assert response.status_code == (200 if route.operation.path == "/health" else 401), url
        assert web.get(f"{server.url}/nope", headers=sent).status_code == 401
        assert web.get(f"{server.url}/nope", headers=sent).headers["www-authenticate"] == "Bearer"
    assert (backend.requests, backend.calls) == ([], [])


@pytest.mark.parametrize("headers", [{"authorization": "Bearer sesame"}, {"x-api-key": "sesame"}])
def test_the_key_opens(web: httpx.Client, backend: FakeBackend, headers: dict[str, str]) -> None:
    with served(backend, ApiSettings(api_key="sesame")) as server:
        assert web.get(f"{server.url}/api/models", headers=headers).status_code == 200
        for path, body in POSTS.items():
            assert web.post(server.url + path, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["", "a b\n", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        ApiSettings(api_key=key)


def routes(backend: FakeBackend) -> list[ApiRoute]:
    found = build_app(backend, ApiSettings()).routes
    assert all(isinstance(route, ApiRoute) for route in found), "a route without the guard of its endpoint"
    return [route for route in found if isinstance(route, ApiRoute)]


def test_every_route_is_guarded_and_only_health_is_public(backend: FakeBackend) -> None:
    assert [route.operation.path for route in routes(backend) if route.served_by.public] == ["/health"]
    changing = {(route.operation.method, route.operation.path) for route in routes(backend) if route.served_by.mutates}
    assert changing == {
        ("POST", "/api/instances"),
        ("DELETE", "/api/instances/{instance:path}"),
        ("POST", "/api/instances/{instance:path}/retry"),
        ("POST", "/api/nodes/{node}/drain"),
        ("POST", "/api/nodes/{node}/resume"),
        # They change nothing, but make nodes busy: as little for a page of somebody else's as the others.
        ("POST", "/api/links/measure"),
        ("POST", "/api/place"),
    }


def test_json_with_a_charset_is_json(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    replies: list[AnyReply] = [Created(instance=InstanceId("gone"), sequence=1)]
    backend.replies = lambda request: replies[0]
    kind = {"content-type": "Application/JSON; charset=utf-8"}
    response = web.post(f"{server.url}/api/instances", content=msgspec.json.encode(SPEC), headers=kind)
    assert response.status_code != 415
