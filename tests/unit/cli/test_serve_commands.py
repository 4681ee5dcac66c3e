"""Where `muster up` and `muster coordinator` serve HTTP, from their options."""

from __future__ import annotations

import pytest

from muster.cli import serve_commands
from muster.cli.processes import http_url, is_loopback
from muster.cli.serve_commands import _api_settings, _http_port
from muster.errors import RequestError


@pytest.mark.parametrize(
    ("chosen", "control", "expected"), [(None, 5710, 5713), (None, 0, 0), (0, 5710, 0), (80, 5710, 80), (80, 65535, 80)]
)
def test_the_port(chosen: int | None, control: int, expected: int) -> None:
    assert _http_port(chosen, control) == expected


def test_a_control_port_that_leaves_no_room_for_http() -> None:
    assert _http_port(None, 65_532) == 65_535
    with pytest.raises(RequestError, match="65536") as caught:
        _http_port(None, 65_533)
    assert "--http-port" in caught.value.remedy


def test_settings() -> None:
    settings = _api_settings("0.0.0.0", 80, ["a", "b"], "sesame")
    assert (settings.host, settings.port, settings.names, settings.api_key) == ("0.0.0.0", 80, ("a", "b"), "sesame")
    with pytest.raises(RequestError, match="API key"):
        _api_settings("0.0.0.0", 80, None, "ä")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("*", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("node", "http://node:80"),
    ],
)
def test_the_url(host: str, url: str) -> None:
    assert http_url(host, 80) == url


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False)]
)
def test_who_reaches_it(host: str, local: bool) -> None:
    assert is_loopback(host) == local


def test_the_commands_know_the_same_options() -> None:
    shared = {"http_port", "http_host", "http_name", "no_http", "api_key"}
    for command in (serve_commands.up, serve_commands.coordinator):
        assert shared <= set(command.__annotations__)
