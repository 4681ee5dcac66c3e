"""What operators ask of nodes and instances over HTTP."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from fake_backend import Call, FakeBackend, refused
from serving import Served

from muster.protocol import Drain, Resume, Retry
from muster.replies import Accepted, AnyReply, Noted
from muster.spec import BootId, InstanceId, InstanceSpec, ModelWorkload, NodeId, NodeInfo
from muster.state import Instance, Node, Starting, State

ONE = InstanceId("one-1")
JSON = {"content-type": "application/json"}


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    info = NodeInfo(
        node=NodeId("a"),
        boot=BootId("a-boot"),
        hostname="host",
        machine="machine",
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=1000,
        max_ranks=8,
    )
    one = Instance(
        id=ONE,
        spec=InstanceSpec(workload=ModelWorkload(model="org/tiny"), name="org/my one"),
        created_ns=5,
        attempt=1,
        backend="ring",
        status=Starting(),
        since_ns=5,
        ranks=(),
        created_by=4,
        caused_by=4,
    )
    made.now = State(sequence=20, nodes={NodeId("a"): Node(info=info, since_ns=1)}, instances={ONE: one})
    made.replies = replies
    return made


def replies(request: Call) -> AnyReply:
    match request:
        case Drain(node=node) | Resume(node=node):
            return Noted(node=node, sequence=21)
        case Retry(instance=name):
            return Accepted(instance=InstanceId(name), sequence=22)
        case _:
            raise AssertionError(request)


@pytest.mark.parametrize(
    ("path", "body", "asked", "answer"),
    [
        ("nodes/a/drain", "", Drain(node=NodeId("a")), {"node": "a", "sequence": 21}),
        ("nodes/a/drain", "{}", Drain(node=NodeId("a")), {"node": "a", "sequence": 21}),
        (
            "nodes/a/drain",
            '{"reason": "new memory", "now": true}',
            Drain(node=NodeId("a"), reason="new memory", now=True),
            {"node": "a", "sequence": 21},
        ),
        ("nodes/a/resume", "", Resume(node=NodeId("a")), {"node": "a", "sequence": 21}),
        ("instances/one-1/retry", "", Retry(instance=ONE), {"instance": ONE, "sequence": 22}),
        (
            "instances/org/my one/retry",
            '{"move": true}',
            Retry(instance=ONE, move=True),
            {"instance": ONE, "sequence": 22},
        ),
    ],
)
def test_a_wish_is_passed_on(
    web: httpx.Client,
    server: Served,
    backend: FakeBackend,
    path: str,
    body: str,
    asked: Call,
    answer: dict[str, object],
) -> None:
    response = web.post(f"{server.url}/api/{path}", content=body, headers=JSON)
    assert (response.status_code, response.json()) == (202, answer)
    assert backend.calls == [asked]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("nodes/a/drain", {"now": "yes"}, "now"),
        ("nodes/a/drain", {"scripts": True}, "scripts"),
        ("nodes/a/drain", {"reason": 5}, "reason"),
        ("nodes/a/resume", {"now": True}, "now"),
        ("instances/one-1/retry", {"move": 1}, "move"),
        ("instances/one-1/retry", {"moves": True}, "moves"),
    ],
)
def test_a_body_that_is_none_is_refused_by_name(
    web: httpx.Client, server: Served, backend: FakeBackend, path: str, body: dict[str, object], field: str
) -> None:
    response = web.post(f"{server.url}/api/{path}", json=body)
    assert (response.status_code, response.json()["error"]["field"]) == (400, field)
    assert backend.calls == []


@pytest.mark.parametrize(
    ("path", "kind", "known"),
    [
        ("nodes/x/drain", "node-unknown", "a"),
        ("nodes/x/resume", "node-unknown", "a"),
        ("instances/x/retry", "instance-unknown", ONE),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    web: httpx.Client, server: Served, backend: FakeBackend, path: str, kind: str, known: str
) -> None:
    response = web.post(f"{server.url}/api/{path}", json={})
    error = response.json()["error"]
    assert (response.status_code, error["kind"], known in error["message"]) == (404, kind, True)
    assert backend.calls == []


def test_a_refusal_of_the_coordinator_has_its_status(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    backend.replies = lambda request: refused("request-invalid", "one-1 has not failed, it is starting")
    response = web.post(f"{server.url}/api/instances/one-1/retry", json={})
    assert (response.status_code, response.json()["error"]["kind"]) == (400, "request-invalid")
    backend.replies = lambda request: refused("log-unavailable", "the disk is full")
    assert web.post(f"{server.url}/api/nodes/a/drain", json={}).status_code == 503


def test_a_page_of_another_site_may_not_drain(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    for headers, status in (
        ({"origin": "http://elsewhere.example", **JSON}, 403),
        ({"content-type": "text/plain"}, 415),
    ):
        assert web.post(f"{server.url}/api/nodes/a/drain", content="{}", headers=headers).status_code == status
    assert web.get(f"{server.url}/api/nodes/a/drain").status_code == 405
    assert backend.calls == []


def test_an_instance_may_be_called_retry(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    named = msgspec.structs.replace(
        backend.now.instances[ONE], spec=InstanceSpec(workload=ModelWorkload(model="m"), name="x/retry")
    )
    backend.now = msgspec.structs.replace(backend.now, instances={ONE: named})
    assert web.get(f"{server.url}/api/instances/x/retry").json()["id"] == ONE
    assert web.post(f"{server.url}/api/instances/x/retry/retry", json={}).status_code == 202
