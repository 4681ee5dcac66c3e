"""Addresses as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.endpoints import DEFAULT_CONTROL_PORT, Endpoint, endpoints_of, parse_endpoint, parse_endpoints
from muster.errors import RequestError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("mac-1", Endpoint("mac-1", DEFAULT_CONTROL_PORT)),
        ("mac-1.local:6000", Endpoint("mac-1.local", 6000)),
        ("tcp://10.0.0.1:1", Endpoint("10.0.0.1", 1)),
        ("tcp://10.0.0.1", Endpoint("10.0.0.1", DEFAULT_CONTROL_PORT)),
        (" host_a:65535\n", Endpoint("host_a", 65535)),
    ],
)
def test_the_usual_forms_are_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no valid host"),
        (":5710", "no valid host"),
        ("http://host:1", 'scheme "http"'),
        ("host:0", "'0'; it must be 1 to 65535"),
        ("host:65536", "'65536'"),
        ("host:", "''; it must"),
        ("host:port", "'port'"),
        ("host:-1", "'-1'"),
        ("host:²", "'²'"),
        ("host:9999999999999", "'9999999999999'"),
        ("[::1]:5710", "IPv6"),
        ("fe80::1", "IPv6"),
        ("tcp://tcp://host", "'//host'"),
        ("ho st", "no valid host"),
        ("host/path", "no valid host"),
        ("*", "no valid host"),
    ],
)
def test_anything_else_is_refused_with_the_value_and_a_remedy(text: str, reason: str) -> None:
    with pytest.raises(RequestError) as info:
        parse_endpoint(text)
    assert reason in info.value.message
    assert repr(text) in info.value.message
    assert info.value.remedy


@given(st.text())
def test_any_text_is_an_endpoint_or_a_request_error(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except RequestError:
        return
    assert endpoint.host
    assert 1 <= endpoint.port <= 65_535
    assert parse_endpoint(endpoint.url) == endpoint


def test_several_addresses_are_read_in_order_each_once() -> None:
    assert parse_endpoints(" a, b:1 ,a:5710") == (Endpoint("a", DEFAULT_CONTROL_PORT), Endpoint("b", 1))
    assert endpoints_of("a,b") == parse_endpoints("a,b")
    assert endpoints_of(Endpoint("a", 1)) == (Endpoint("a", 1),)
    assert endpoints_of([Endpoint("a", 1), Endpoint("a", 1)]) == (Endpoint("a", 1),)
    with pytest.raises(RequestError, match="'' has no valid host"):
        parse_endpoints("a,")
    with pytest.raises(RequestError, match="no address"):
        endpoints_of([])
