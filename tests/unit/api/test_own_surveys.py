"""What is known of nodes, links and models, and where an instance would go, over HTTP."""

from __future__ import annotations

import httpx
import msgspec
import pytest
from fake_backend import Call, FakeBackend, refused
from serving import Served

from muster.facts import NodeFacts
from muster.links import Measured, NodeLinks
from muster.needs import LayerNeeds, ModelNeeds
from muster.protocol import Get, Inspect, Measure, Preview
from muster.replies import AnyReply, Measuring, Needs, Option, Previewed, Snapshot
from muster.spec import BootId, NodeId
from muster.state import State

A, B = NodeId("a"), NodeId("b")
FACTS = NodeFacts(node=A, boot=BootId("1"), chip="M4")
PAIR = Measured(other=B, other_boot=BootId("2"), own="10.0.0.1", host="10.0.0.2", reached=True, rtt_us=80.0)
NEEDS = ModelNeeds(model="org/tiny", model_type="llama", layers=(LayerNeeds(10),), outside_bytes=5)


def replies(request: Call) -> AnyReply:
    match request:
        case Get():
            links = NodeLinks(node=A, boot=BootId("1"), measured=(PAIR,))
            state = msgspec.Raw(msgspec.msgpack.encode(State()))
            return Snapshot(state=state, facts=(FACTS,), links=(links,), measure_round=3)
        case Measure():
            return Measuring(round=4)
        case Inspect(model="org/tiny"):
            return Needs(needs=NEEDS, seen_by=A)
        case Inspect():
            return refused("model-invalid", "nobody has it")
        case Preview():
            return Previewed(options=(Option(refusal="too big"),), remedies=("one more node",))
        case _:
            raise AssertionError(request)


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    made.replies = replies
    return made


def test_facts_and_links_are_what_nodes_told(web: httpx.Client, server: Served) -> None:
    assert web.get(f"{server.url}/api/facts").json()["facts"][0]["chip"] == "M4"
    links = web.get(f"{server.url}/api/links").json()
    assert (links["round"], links["links"][0]["measured"][0]["host"]) == (3, "10.0.0.2")
    measuring = web.post(f"{server.url}/api/links/measure", json={})
    assert (measuring.status_code, measuring.json()["round"]) == (202, 4)


def test_needs_of_a_model_and_of_none(web: httpx.Client, server: Served) -> None:
    tiny = web.get(f"{server.url}/api/needs", params={"model": "org/tiny"})
    assert tiny.json()["needs"]["outside_bytes"] == 5
    unknown = web.get(f"{server.url}/api/needs", params={"model": "org/other"})
    missing = web.get(f"{server.url}/api/needs")
    assert unknown.status_code == 400
    assert unknown.json()["error"]["message"].startswith("nobody has it")
    assert (missing.status_code, missing.json()["error"]["field"]) == (400, "model")


def test_a_preview_creates_nothing(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    body = {"workload": {"type": "model", "model": "org/tiny"}, "ranks": 2}
    answer = web.post(f"{server.url}/api/place", json=body)
    bad = web.post(f"{server.url}/api/place", json={**body, "rank": 1})
    assert answer.json()["options"][0]["refusal"] == "too big"
    assert answer.json()["remedies"] == ["one more node"]
    assert bad.status_code == 400
    assert [type(call) for call in backend.calls] == [Preview]
