"""Whatever a client sends, it is never muster's failure: bodies that are nearly right, on every path that takes one."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from fake_backend import MODEL, FakeBackend, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BODIES: dict[str, Any] = {
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 5,
        "stream": True,
        "stop_sequences": ["a"],
        "system": [{"type": "text", "text": "x"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "metadata": {"user_id": "x"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
    },
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
    "/api/chat": {
        "model": MODEL,
        "format": "json",
        "think": "high",
        "keep_alive": "5m",
        "logprobs": True,
        "top_logprobs": 2,
        "options": {"temperature": 1, "num_predict": 4, "stop": ["a"], "repeat_last_n": 3, "seed": 4},
        "tools": [TOOL],
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
    },
    "/api/generate": {"model": MODEL, "prompt": "x", "raw": True, "options": {}},
    "/api/show": {"model": MODEL},
    "/api/instances": {
        "workload": {"type": "script", "path": "/x", "environment": {"a": "b"}, "arguments": ["x"]},
        "restart": {"type": "on-failure", "maximum": 3},
        "deadlines": {"form_seconds": 3},
        "nodes": ["a"],
        "ranks": 1,
        "key": "k",
        "name": "n",
    },
    "/v1/chat/completions": {
        "model": MODEL,
        "stream": True,
        "n": 2,
        "stop": ["a"],
        "logit_bias": {"1": 2},
        "tools": [TOOL],
        "tool_choice": "required",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    },
    "/v1/completions": {"model": MODEL, "prompt": ["a"], "max_tokens": 3, "echo": True, "logprobs": 2},
    "/v1/responses": {"model": MODEL, "input": [{"role": "user", "content": "x"}], "max_output_tokens": 4},
}

values = st.one_of(
    st.none() | st.booleans() | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**30), 10**30),
    st.sampled_from([[], {}, [None], [[]], {"type": "text"}, {"a": {"b": [1]}}, 0, -1, "\0", 10**400]),
)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every container within, with each of its keys or positions."""
    keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    return [(node, key) for key in keys] + [place for key in keys for place in places(node[key])]


@st.composite
def nearly_right(draw: st.DrawFn, body: Any) -> bytes:
    changed = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        found = places(changed)
        if not found:
            break
        node, key = draw(st.sampled_from(found))
        if isinstance(node, dict) and draw(st.booleans()):
            del node[key]
        else:
            node[key] = copy.deepcopy(draw(values))
    return json.dumps(changed).encode()


@pytest.mark.parametrize("path", list(BODIES))
def test_what_is_nearly_right_is_answered_or_refused(
    web: httpx.Client, server: Served, backend: FakeBackend, path: str
) -> None:
    backend.replies = lambda request: refused("placement-refused", "no")

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    @given(nearly_right(BODIES[path]))
    def check(body: bytes) -> None:
        response = web.post(server.url + path, content=body, headers={"content-type": "application/json"})
        assert response.status_code in {200, 400, 404, 409}, response.text
        assert "see its log" not in response.text

    check()
