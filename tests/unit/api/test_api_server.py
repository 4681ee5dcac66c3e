"""What holds for every dialect, over a real socket: bodies, clients that leave, slow readers, the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Generator

import httpx
import msgspec
import pytest
from fake_backend import MODEL, FakeBackend, answer, done, refused, started
from serving import Served, served, wait_until

from muster.api.bodies import MAX_BODY_BYTES
from muster.api.server import HttpServer
from muster.api.settings import ApiSettings
from muster.errors import PortError
from muster.replies import Chunk, Prefilled

CHATS = {
    "/v1/messages": {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
}
PATHS = list(CHATS)
#: Nobody is asked for one; to read the usual ones takes a tenth of a second for each client.
CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture
def client(server: Served) -> Generator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20, verify=CERTIFICATES) as client:
        yield client


def port_of(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def ask(server: Served, path: str, *, stream: bool) -> socket.socket:
    """Ask on a raw connection, without waiting for an answer."""
    body = msgspec.json.encode({**CHATS[path], "stream": stream})
    connection = socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


# --- clients that leave -------------------------------------------------------------------------------------


MOMENTS = {
    "waiting": [],
    "taken": [started()],
    "prefilling": [started(4096), Prefilled(done=512, total=4096)],
    "answering": [started(), Chunk(text="Hel")],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_client_that_leaves_cancels_its_request(
    server: Served, backend: FakeBackend, path: str, stream: bool, moment: str
) -> None:
    backend.script = MOMENTS[moment]
    with ask(server, path, stream=stream):
        wait_until(lambda: bool(backend.streams), "the request")
        asked = backend.streams[0]
        wait_until(lambda: asked.given == len(MOMENTS[moment]), "the moment")
        assert not asked.cancelled
    wait_until(lambda: asked.cancelled, "the cancellation")


def test_many_clients_that_leave_leave_nothing_behind(server: Served, backend: FakeBackend) -> None:
    backend.script = [started(), Chunk(text="Hel")]
    tasks = server.portal.call(running_tasks)
    for count in (60, 120, 180):
        asked = [ask(server, path, stream=stream) for path in PATHS for stream in (True, False) for _ in range(10)]
        while len(backend.streams) < count:
            server.portal.call(running_tasks)
        for connection in asked:
            connection.close()
        wait_until(lambda: all(stream.cancelled for stream in backend.streams), "the cancellations")
        wait_until(lambda: server.portal.call(running_tasks) == tasks, "the end of all tasks")


async def running_tasks() -> int:
    return len(asyncio.all_tasks())


def test_a_client_that_leaves_while_it_sends_its_body_asks_nothing(server: Served, backend: FakeBackend) -> None:
    with socket.create_connection(("127.0.0.1", port_of(server))) as connection:
        connection.sendall(b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert backend.requests == []


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_was_read_to_its_end_is_not_cancelled(
    client: httpx.Client, backend: FakeBackend, path: str
) -> None:
    for stream in (True, False):
        client.post(path, json={**CHATS[path], "stream": stream}).raise_for_status()
    assert [stream.cancelled for stream in backend.streams] == [False, False]


def test_a_reader_that_is_slow_holds_the_stream_back(server: Served, backend: FakeBackend) -> None:
    backend.script = [started(), *[Chunk(text="x" * 65_536)] * 4000, done()]
    with ask(server, "/v1/messages", stream=True):
        wait_until(lambda: bool(backend.streams) and backend.streams[0].given > 3, "the first pieces")
        with httpx.Client(verify=CERTIFICATES) as other:
            for _ in range(200):
                other.get(f"{server.url}/health").raise_for_status()
        assert backend.streams[0].given < 1000, "a quarter of the answer waits in memory"
    wait_until(lambda: backend.streams[0].cancelled, "the cancellation")


# --- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_before_the_first_piece_is_a_status(client: httpx.Client, backend: FakeBackend, path: str) -> None:
    backend.script = [refused("queue-full", "512 requests wait already")]
    for stream in (True, False):
        response = client.post(path, json={**CHATS[path], "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert "512 requests wait already" in response.text


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_breaks_off_says_so_in_its_last_event(
    client: httpx.Client, backend: FakeBackend, path: str
) -> None:
    backend.script = [started(), Chunk(text="Hel"), refused("answer-lost", "rank 1 was killed")]
    response = client.post(path, json={**CHATS[path], "stream": True})
    assert response.status_code == 200
    last = response.text.strip().splitlines()[-1]
    assert "rank 1 was killed" in last
    assert "Hel" in response.text
    whole = client.post(path, json={**CHATS[path], "stream": False})
    assert (whole.status_code, "rank 1 was killed" in whole.text) == (502, True)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_progress_of_a_long_prompt_is_a_comment(client: httpx.Client, backend: FakeBackend, path: str) -> None:
    backend.script = [started(4096), Prefilled(done=512, total=4096), *answer("a")[1:]]
    assert ": prefill 512/4096\n\n" in client.post(path, json={**CHATS[path], "stream": True}).text


def test_lines_of_json_have_no_comments(client: httpx.Client, backend: FakeBackend) -> None:
    backend.script = [started(4096), Prefilled(done=512, total=4096), *answer("a")[1:]]
    for line in client.post("/api/chat", json=CHATS["/api/chat"]).text.splitlines():
        assert isinstance(msgspec.json.decode(line), dict)


def test_an_event_is_sent_as_soon_as_it_is_there(client: httpx.Client, server: Served, backend: FakeBackend) -> None:
    backend.script = [started()]
    with client.stream("POST", "/api/chat", json=CHATS["/api/chat"]) as response:
        lines = response.iter_lines()
        for text in ("one", "two"):
            server.portal.call(backend.streams[0].add, Chunk(text=text))
            assert msgspec.json.decode(next(lines))["message"]["content"] == text
        server.portal.call(backend.streams[0].add, done())
        assert msgspec.json.decode(next(lines))["done"] is True


# --- bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_more_than_ten_megabytes_is_too_large(client: httpx.Client, path: str) -> None:
    body = b" " * (MAX_BODY_BYTES + 1)
    assert client.post(path, content=body).status_code == 413
    # Without a Content-Length.
    assert client.post(path, content=iter([body[: MAX_BODY_BYTES // 2]] * 3)).status_code == 413
    assert client.post(path, content=body[:-1]).status_code == 400
    assert client.get("/health").status_code == 200


def test_a_body_that_says_that_it_is_huge_is_refused_before_it_comes(server: Served) -> None:
    for declared, more in (("99999999999", ""), (str(MAX_BODY_BYTES + 1), "Expect: 100-continue\r\n")):
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=20) as connection:
            head = f"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: {declared}\r\n{more}\r\n"
            connection.sendall(head.encode())
            response = http.client.HTTPResponse(connection)
            response.begin()
            assert (response.status, response.getheader("connection")) == (413, "close")
            response.close()


BAD = [
    (b"not json", None),
    (b"", None),
    (b"[]", None),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}', "model"),
    (b'{"model": "tiny/model", "max_tokens": 1}', "messages"),
    (b'{"model": "tiny/model", "max_tokens": 1, "messages": []}', "messages"),
    (b'{"model": "tiny/model", "max_tokens": 1, "messages": [{"role": "robot", "content": ""}]}', "messages[0].role"),
    (b'{"model": "tiny/model", "max_tokens": 1, "messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    (b'{"model": "tiny/model", "max_tokens": 1, "messages": "hi"}', "messages"),
    (b'{"model": 7, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}', "model"),
    (b'{"model": "tiny/model", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "zz": 1}', "zz"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_bad_body_is_a_400_that_names_the_field(
    client: httpx.Client, backend: FakeBackend, path: str, body: bytes, field: str | None
) -> None:
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field is None or field in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_a_404_with_the_names_that_exist(client: httpx.Client, path: str) -> None:
    for stream in (True, False):
        response = client.post(path, json={**CHATS[path], "model": "nobody", "stream": stream})
        assert response.status_code == 404
        assert MODEL in response.text


# --- the server ---------------------------------------------------------------------------------------------


def test_a_failure_of_ours_is_a_500_in_shape(client: httpx.Client, backend: FakeBackend) -> None:
    def broken(request: object) -> list[Chunk]:
        raise RuntimeError("secret")

    backend.script = broken
    for path in PATHS:
        response = client.post(path, json=CHATS[path])
        assert response.status_code == 500
        assert "see its log" in response.text
        assert "secret" not in response.text


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/nope", "message"),
        ("/v1/messages/nope", "message"),
        ("/nope", "message"),
        ("/api/instances/x/y", "message"),
    ],
)
def test_a_path_that_is_not_there_is_a_404_in_the_dialect(client: httpx.Client, path: str, field: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert field in response.json()["error"]


def test_a_method_that_is_not_there_is_a_405_that_says_which_are(client: httpx.Client) -> None:
    response = client.get("/api/chat")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "it takes POST" in response.json()["error"]
    assert client.delete("/api/embed").json()["error"].startswith("there is no DELETE /api/embed")


def test_every_answer_has_an_id(client: httpx.Client) -> None:
    first, second = (client.get("/health").headers["request-id"] for _ in range(2))
    assert first.startswith("req_")
    assert first != second
    assert client.post("/api/chat", json=CHATS["/api/chat"]).headers["x-request-id"].startswith("req_")
    assert client.get("/nope").headers["request-id"].startswith("req_")


@pytest.mark.parametrize("path", PATHS)
def test_a_server_that_ends_tells_those_who_wait(backend: FakeBackend, path: str) -> None:
    backend.script = [started(), Chunk(text="Hel")]
    with httpx.Client(timeout=20, verify=CERTIFICATES) as client:
        with served(backend) as server:
            request = client.build_request("POST", server.url + path, json={**CHATS[path], "stream": True})
            response = client.send(request, stream=True)
            whole = ask(server, path, stream=False)
            wait_until(lambda: len(backend.streams) == 2 and backend.streams[1].given == 2, "the second request")
        text = response.read().decode()
        assert "the coordinator is stopping" in text.strip().splitlines()[-1]
        with whole:
            reply = http.client.HTTPResponse(whole)
            reply.begin()
            assert (reply.status, b"stopping" in reply.read()) == (503, True)
    assert all(stream.cancelled for stream in backend.streams)


def test_a_port_that_is_taken_is_an_error_that_says_so(server: Served, backend: FakeBackend) -> None:
    port = port_of(server)
    second = HttpServer(backend, ApiSettings(port=port))
    with pytest.raises(PortError, match=rf"port {port} \(for HTTP\) on 127.0.0.1 cannot be had: address"):
        server.portal.call(second.run)
    with pytest.raises(PortError, match="cannot be had"):
        server.portal.call(HttpServer(backend, ApiSettings(host="203.0.113.7")).run)
