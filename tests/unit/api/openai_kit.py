"""A fake coordinator behind a real socket, and the official `openai` client in front of it."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import httpx
import msgspec
import openai
from fake_backend import MODEL, FakeBackend, Script
from serving import served

from muster.protocol import Generate
from muster.replies import AnyPiece

#: Loading the system's would take longer than the test.
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Kit:
    """Ask with `client` or `post`; `asked` is what reached the coordinator."""

    def __init__(self, backend: FakeBackend, url: str, http: httpx.Client, client: openai.OpenAI) -> None:
        self.backend = backend
        self.url = url
        self.http = http
        self.client = client

    @property
    def asked(self) -> Generate:
        """The only request that reached the coordinator."""
        (request,) = self.backend.requests
        return request

    def post(self, path: str, body: object) -> httpx.Response:
        """Send a body as it is, or as JSON."""
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.post(path, content=content, headers={"content-type": "application/json"})

    def chat(self, **fields: object) -> httpx.Response:
        """Ask for a chat completion, by default of one small message."""
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": [user("Hi")]} | fields)

    def respond(self, **fields: object) -> httpx.Response:
        """Ask for a response, by default to one small input."""
        return self.post("/v1/responses", {"model": MODEL, "input": "Hi"} | fields)

    def complete(self, **fields: object) -> httpx.Response:
        """Ask for a completion, by default of one small prompt."""
        return self.post("/v1/completions", {"model": MODEL, "prompt": "Hi"} | fields)


@contextmanager
def asking(script: Script | Sequence[AnyPiece] | None = None) -> Generator[Kit]:
    """Serve the script while the body runs."""
    backend = FakeBackend(script)
    with (
        served(backend) as server,
        httpx.Client(base_url=server.url, timeout=20, verify=_NO_CERTIFICATES) as http,
        openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            http_client=openai.DefaultHttpxClient(verify=_NO_CERTIFICATES),
        ) as client,
    ):
        yield Kit(backend, server.url, http, client)


def user(content: object) -> dict[str, object]:
    """A message of a user."""
    return {"role": "user", "content": content}


def events(response: httpx.Response) -> list[Any]:
    """The data of each event, without the last `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    if lines[-1] == "[DONE]":
        lines.pop()
    return [msgspec.json.decode(line) for line in lines]


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str]:
    """The field and the message of an error."""
    assert response.status_code == status, response.text
    error = cast("dict[str, Any]", response.json()["error"])
    assert set(error) == {"message", "type", "param", "code"}
    return error["param"] or "", error["message"]
