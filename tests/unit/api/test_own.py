"""Muster's own API: instances, nodes, models, the state and the events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from fake_backend import MODEL, FakeBackend, refused
from serving import Served, served, wait_until

from muster.api import own
from muster.events import Envelope, Event, InstanceDeleted, InstanceDeleting, NodeLost, encode_event
from muster.protocol import Beat, Create, Delete, Get
from muster.replies import Accepted, AnyReply, Created, NodeClock, Refused, Snapshot
from muster.spec import (
    COORDINATOR,
    BootId,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    NodeInfo,
    ScriptWorkload,
    Shortfall,
)
from muster.state import Instance, Node, State

ONE, TWO = InstanceId("one-1"), InstanceId("two-2")


def node_info(node: str) -> NodeInfo:
    return NodeInfo(
        node=NodeId(node),
        boot=BootId(f"{node}-boot"),
        hostname="host",
        machine="machine",
        pid=1,
        addresses=(),
        backends=("ring",),
        memory_bytes=1000,
        max_ranks=8,
    )


def instance(name: InstanceId, created_by: int) -> Instance:
    """An instance that has just been created; what it is made of does not matter here."""
    spec = InstanceSpec(workload=ModelWorkload(model="org/tiny"), name=f"my {name}")
    document = {
        "id": name,
        "spec": msgspec.to_builtins(spec),
        "created_ns": 5,
        "attempt": 1,
        "backend": "ring",
        "status": {"type": "starting"},
        "since_ns": 5,
        "ranks": [],
        "created_by": created_by,
        "caused_by": created_by,
    }
    return msgspec.convert(document, Instance)


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    nodes = {
        NodeId("a"): Node(info=node_info("a"), since_ns=1),
        NodeId("b"): Node(info=node_info("b"), since_ns=1, lost="it is silent"),
    }
    instances = {TWO: instance(TWO, 9), ONE: instance(ONE, 4)}
    made.now = State(sequence=20, epoch="epoch", nodes=nodes, instances=instances)
    made.replies = replies
    return made


def replies(request: object) -> AnyReply:
    match request:
        case Create():
            return Created(instance=ONE, sequence=4)
        case Delete(instance=name):
            return Accepted(instance=InstanceId(name), sequence=21)
        case Get():
            beats = tuple(Beat(node=NodeId(name), boot=node_info(name).boot, warm_runners=2) for name in "ab")
            clocks = tuple(NodeClock(node=NodeId(name), offset_ns=-7, error_ns=1) for name in "ab")
            return Snapshot(
                state=msgspec.Raw(b""),
                beats=beats,
                memory_bytes=100,
                log_bytes=200,
                clocks=clocks,
                fenced={"boot": 3},
            )
        case _:
            raise AssertionError(request)


# --- instances ----------------------------------------------------------------------------------------------


def test_the_instances_the_oldest_first(web: httpx.Client, server: Served) -> None:
    found = web.get(f"{server.url}/api/instances").json()["instances"]
    assert [one["id"] for one in found] == [ONE, TWO]
    assert found[0]["status"] == {"type": "starting"}


@pytest.mark.parametrize("name", [ONE, "my one-1", "one", "my%20one-1"])
def test_one_instance_by_id_or_name(web: httpx.Client, server: Served, name: str) -> None:
    assert web.get(f"{server.url}/api/instances/{name}").json()["id"] == ONE


def test_an_instance_that_is_not_there(web: httpx.Client, server: Served) -> None:
    for response in (web.get(f"{server.url}/api/instances/x"), web.delete(f"{server.url}/api/instances/x")):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["kind"], ONE in error["message"]) == ("instance-unknown", True)


def test_an_instance_is_created_from_its_spec(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    workload = {"type": "script", "path": "/x.py", "environment": {"A": "1"}, "arguments": ["-v"]}
    body = {"workload": workload, "ranks": 2, "nodes": ["a"], "key": "mine", "deadlines": {"form_seconds": 3}}
    response = web.post(f"{server.url}/api/instances", json=body)
    assert (response.status_code, response.json()["id"]) == (201, ONE)
    asked = backend.calls[0]
    assert isinstance(asked, Create)
    assert (asked.key, asked.spec.ranks, asked.spec.deadlines.form_seconds) == ("mine", 2, 3)
    assert asked.spec.workload == ScriptWorkload(path="/x.py", environment={"A": "1"}, arguments=("-v",))
    assert type(asked.spec) is InstanceSpec


SCRIPT = {"type": "script", "path": "/x.py"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "workload"),
    ({"workload": {}}, "workload.type"),
    ({"workload": {"type": "war"}}, "workload.type"),
    ({"workload": {"type": "script"}}, "workload.path"),
    ({"workload": {**SCRIPT, "paht": "x"}}, "workload.paht"),
    ({"workload": SCRIPT, "restart": {"type": "on-failure", "often": 1}}, "restart.often"),
    ({"workload": SCRIPT, "deadlines": {"form": 1}}, "deadlines.form"),
    ({"workload": SCRIPT, "rank": 1}, "rank"),
    ({"workload": SCRIPT, "ranks": 0}, "ranks"),
    ({"workload": SCRIPT, "ranks": "2"}, "ranks"),
    ({"workload": {"type": "model", "model": "m", "max_batch": 0}}, "workload"),
    ({"workload": SCRIPT, "key": 1}, "key"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[repr(body) for body, _ in REFUSED])
def test_a_spec_that_is_none_is_refused_by_name(
    web: httpx.Client, server: Served, backend: FakeBackend, body: dict[str, Any], field: str
) -> None:
    response = web.post(f"{server.url}/api/instances", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["kind"] == "request-invalid"
    assert field in error["message"]
    assert backend.calls == []


def test_a_spec_that_finds_no_place_is_a_conflict(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    backend.replies = lambda request: refused("placement-refused", "no node has 9 GiB")
    response = web.post(f"{server.url}/api/instances", json={"workload": SCRIPT})
    assert response.status_code == 409
    assert response.json() == {"error": {"kind": "placement-refused", "message": "no node has 9 GiB"}}
    short = Shortfall(node=NodeId("a"), reason="x", needed_bytes=9, available_bytes=7, missing_bytes=2)
    backend.replies = lambda request: Refused(
        failure=Failure(kind="placement-refused", message="no room"), shortfalls=(short,)
    )
    response = web.post(f"{server.url}/api/instances", json={"workload": SCRIPT})
    assert response.json()["error"]["shortfalls"] == [msgspec.to_builtins(short)]
    assert {"node", "what", "needed_bytes", "available_bytes", "missing_bytes"} < {*msgspec.to_builtins(short)}


@pytest.mark.parametrize(("query", "now"), [("", False), ("?now=1", True), ("?now=false", False), ("?now", True)])
def test_an_instance_is_deleted(web: httpx.Client, server: Served, backend: FakeBackend, query: str, now: bool) -> None:
    response = web.delete(f"{server.url}/api/instances/my one-1{query}")
    assert (response.status_code, response.json()) == (202, {"instance": ONE, "sequence": 21})
    assert backend.calls == [Delete(instance=ONE, now=now)]


def test_a_flag_that_is_none(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    response = web.delete(f"{server.url}/api/instances/{ONE}?now=soon")
    assert (response.status_code, response.json()["error"]["field"]) == (400, "now")
    assert backend.calls == []


# --- nodes, models, state -----------------------------------------------------------------------------------


def test_the_nodes_with_what_their_heartbeats_say(web: httpx.Client, server: Served) -> None:
    found = web.get(f"{server.url}/api/nodes").json()["nodes"]
    assert [one["node"]["info"]["node"] for one in found] == ["a", "b"]
    assert (found[0]["beat"]["warm_runners"], found[0]["node"]["lost"]) == (2, None)
    assert (found[0]["clock"]["offset_ns"], found[0]["node"]["duty"]) == (-7, {"type": "serving"})
    assert (found[1]["beat"], found[1]["clock"], found[1]["node"]["lost"]) == (None, None, "it is silent")


def test_the_models(web: httpx.Client, server: Served) -> None:
    found = web.get(f"{server.url}/api/models").json()["models"]
    assert [(one["name"], one["ready"]) for one in found] == [(MODEL, 1)]


def test_the_state(web: httpx.Client, server: Served) -> None:
    found = web.get(f"{server.url}/api/state").json()
    assert (found["state"]["sequence"], found["memory_bytes"], found["log_bytes"]) == (20, 100, 200)
    assert set(found["state"]["instances"]) == {ONE, TWO}
    assert (found["fenced"], [clock["node"] for clock in found["clocks"]]) == ({"boot": 3}, ["a", "b"])


# --- events -------------------------------------------------------------------------------------------------


def envelope(sequence: int, event: Event) -> Envelope:
    return Envelope(sequence=sequence, time_ns=sequence, origin=COORDINATOR, cause=0, body=encode_event(event))


def deleting(sequence: int, name: InstanceId) -> Envelope:
    return envelope(sequence, InstanceDeleting(instance=name, attempt=1))


PAST = [
    deleting(18, ONE),
    deleting(19, TWO),
    envelope(20, NodeLost(node=NodeId("b"), boot=node_info("b").boot, reason="x")),
]
NEWS = [deleting(21, TWO), envelope(22, InstanceDeleted(instance=ONE, attempt=1))]


def sequences(lines: Iterator[str], count: int) -> list[int]:
    """The ids of the next events; each of its data agrees."""
    found: list[int] = []
    while len(found) < count:
        line = next(lines)
        if line.startswith("id: "):
            found.append(int(line.removeprefix("id: ")))
        elif line.startswith("data: "):
            assert msgspec.json.decode(line.removeprefix("data: "))["sequence"] == found[-1]
    return found


@pytest.mark.parametrize(
    ("query", "headers", "expected"),
    [
        ("", {}, [21, 22]),
        ("?after=18", {}, [19, 20, 21, 22]),
        ("?after=0", {}, [18, 19, 20, 21, 22]),
        ("", {"last-event-id": "19"}, [20, 21, 22]),
        ("?after=0", {"last-event-id": "19"}, [20, 21, 22]),
        (f"?after=0&instance={ONE}", {}, [18, 22]),
        ("?after=0&instance=my one-1", {}, [18, 22]),
        (f"?instance={ONE}", {}, [22]),
    ],
)
def test_events_go_on_where_the_reader_stopped(
    web: httpx.Client, server: Served, backend: FakeBackend, query: str, headers: dict[str, str], expected: list[int]
) -> None:
    backend.envelopes = list(PAST)
    with web.stream("GET", f"{server.url}/api/events{query}", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        wait_until(lambda: backend.followers == 1, "the follower")
        server.portal.call(backend.publish, *NEWS)
        assert sequences(response.iter_lines(), len(expected)) == expected
    wait_until(lambda: backend.followers == 0, "the end of the follower")


def test_a_parameter_of_events_that_is_not_known_is_refused(web: httpx.Client, server: Served) -> None:
    reply = web.get(f"{server.url}/api/events?instnce=x")
    assert reply.status_code == 400
    assert reply.json()["error"]["field"] == "instnce"


def test_an_event_says_what_happened(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    unknown = Envelope(
        sequence=19, time_ns=7, origin=NodeId("a"), cause=3, body=msgspec.Raw(msgspec.msgpack.encode({"type": "x.new"}))
    )
    backend.envelopes = [PAST[0], unknown]
    with web.stream("GET", f"{server.url}/api/events?after=0") as response:
        data = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        first, second = (msgspec.json.decode(next(data)) for _ in range(2))
    assert (first["kind"], first["event"]["type"], first["event"]["instance"]) == (
        "instance.deleting",
        "instance.deleting",
        ONE,
    )
    assert second == {"sequence": 19, "time_ns": 7, "origin": "a", "cause": 3, "kind": "x.new", "event": None}


@pytest.mark.parametrize("query", ["?after=-1", "?after=x", "?after=99999999999999999999"])
def test_a_place_in_the_log_that_is_none(web: httpx.Client, server: Served, query: str) -> None:
    response = web.get(f"{server.url}/api/events{query}")
    assert (response.status_code, response.json()["error"]["field"]) == (400, "after")


def test_a_quiet_stream_says_that_it_is_alive(
    web: httpx.Client, server: Served, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "IDLE_SECONDS", 0.02)
    with web.stream("GET", f"{server.url}/api/events") as response:
        comments = (line for line in response.iter_lines() if line)
        assert [next(comments) for _ in range(3)] == [": after 20", ": idle", ": idle"]
        server.portal.call(backend.publish, NEWS[0])
        assert sequences(comments, 1) == [21]


def test_the_end_of_the_server_ends_the_stream(web: httpx.Client, backend: FakeBackend) -> None:
    with served(backend) as server:
        response = web.send(web.build_request("GET", f"{server.url}/api/events"), stream=True)
        wait_until(lambda: backend.followers == 1, "the follower")
    text = response.read().decode()
    assert text.startswith(": after 20\n\nevent: error\n")
    assert backend.followers == 0
