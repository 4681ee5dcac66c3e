"""Who knows what a model needs: this machine, then nodes, then the hub; and what is said where nobody does."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest
from books import Books, info

from muster.coordinator import inspection
from muster.coordinator.inspection import Inspection
from muster.coordinator.knowledge import Knowledge
from muster.errors import FetchError, ModelError, PeerError
from muster.events import NodeJoined
from muster.facts import HeldModel, NodeFacts
from muster.fetch.survey import Survey
from muster.needs import LayerNeeds, ModelNeeds
from muster.peer_protocol import Inspected, InspectModel, PeerRefused
from muster.replies import Needs
from muster.spec import BootId, Failure, NodeAddress, NodeId

NEEDS = ModelNeeds(model="m", model_type="llama", layers=(LayerNeeds(weights_bytes=8),), outside_bytes=4)

_Answer = Callable[[InspectModel], Awaitable[object]]


class Files:
    """In the place of a survey: what is here and on the hub, `None` or an error."""

    def __init__(self, here: ModelNeeds | Exception | None = None, hub: ModelNeeds | Exception | None = None) -> None:
        self._here, self._hub = here, hub
        self.asked: list[str] = []

    def here(self, model: str, revision: str | None) -> ModelNeeds | None:
        del model, revision
        return self._answer("here", self._here)

    def hub(self, model: str, revision: str | None) -> ModelNeeds | None:
        del model, revision
        return self._answer("hub", self._hub)

    def _answer(self, name: str, answer: ModelNeeds | Exception | None) -> ModelNeeds | None:
        self.asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Cluster:
    """Nodes at ports 1, 2, …, each with what it answers; an exception is raised."""

    def __init__(self, files: Files, *answers: Any, holds: str = "", dead: tuple[str, ...] = ()) -> None:
        books = Books()
        self._dead = dead
        self.knowledge = Knowledge()
        self.asked: list[tuple[int, bool]] = []
        self._answers = answers
        for number in range(1, len(answers) + 1):
            node = msgspec.structs.replace(info(f"n{number}"), peer_port=number)
            there = tuple(NodeAddress(host=host, network=f"{host}/32") for host in dead)
            node = msgspec.structs.replace(node, addresses=(*there, *node.addresses))
            books.ledger.commit(NodeJoined(info=node))
        if holds:
            models = (HeldModel(model="owner/m", path="/copies/m"),)
            self.knowledge.facts[NodeId(holds)] = NodeFacts(node=NodeId(holds), boot=BootId("boot-1"), models=models)
        self._state = books.ledger.state
        self._inspection = Inspection(self.knowledge, survey=cast("Survey", files), ask=self._ask)

    async def _ask(self, host: str, port: int, request: InspectModel, seconds: float) -> object:
        del seconds
        if host in self._dead:
            await anyio.sleep_forever()
        self.asked.append((port, request.ask_hub))
        answer = self._answers[port - 1]
        if callable(answer):
            return await cast("_Answer", answer)(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def needs(self, model: str = "owner/m") -> Needs | Failure:
        return anyio.run(self._inspection.needs, model, None, self._state)


def refused(message: str, *, retryable: bool = False) -> PeerRefused:
    return PeerRefused(failure=Failure(kind="model-invalid", message=message, retryable=retryable))


NOT_HERE = refused("model 'owner/m' is no directory on this node and no hub id (owner/name)")


def test_files_here_settle_it() -> None:
    cluster = Cluster(Files(here=NEEDS), Inspected(needs=NEEDS))
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId(""))
    assert cluster.asked == []


def test_an_old_commit_on_the_coordinators_machine_is_not_what_nodes_are_to_take() -> None:
    at = msgspec.structs.replace(NEEDS, commit="1" * 40)
    assert Cluster(Files(here=at)).needs() == Needs(needs=NEEDS, seen_by=NodeId(""))
    assert Cluster(Files(), Inspected(needs=at)).needs() == Needs(needs=at, seen_by=NodeId("n1"))
    assert Cluster(Files(hub=at)).needs() == Needs(needs=at, seen_by=NodeId(""))


def test_the_first_node_that_has_it_settles_it() -> None:
    files = Files()
    cluster = Cluster(files, NOT_HERE, PeerError("gone"), Inspected(needs=NEEDS))
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId("n3"))
    assert files.asked == ["here"]


def test_a_node_that_hangs_does_not_hold_the_others_up() -> None:
    async def hang(request: InspectModel) -> object:
        del request
        await anyio.sleep_forever()

    cluster = Cluster(Files(), hang, Inspected(needs=NEEDS))
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId("n2"))


def test_the_hub_is_asked_from_here_and_then_by_a_node_that_may_reach_it() -> None:
    async def only_the_hub(request: InspectModel) -> object:
        return Inspected(needs=NEEDS) if request.ask_hub else NOT_HERE

    files = Files(hub=NEEDS)
    cluster = Cluster(files, NOT_HERE)
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId(""))
    assert cluster.asked == [(1, False)]
    cluster = Cluster(Files(hub=FetchError("no route")), NOT_HERE, only_the_hub, holds="n2")
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId("n2"))
    assert cluster.asked[0] == (2, False), "who holds the model is asked first"


def test_what_the_hub_refuses_is_the_answer_and_no_node_is_asked_again() -> None:
    cluster = Cluster(Files(hub=ModelError("the hub has no model owner/m", remedy="check the id")), NOT_HERE)
    found = cluster.needs()
    assert isinstance(found, Failure)
    assert (found.kind, found.message, found.remedy) == (
        "model-invalid",
        "the hub has no model owner/m",
        "Check the id.",
    )
    assert cluster.asked == [(1, False)]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (Cluster(Files(), NOT_HERE), "is on no node that could be asked"),
        (Cluster(Files()), "no node to ask"),
        (Cluster(Files(here=ModelError("w is truncated")), NOT_HERE), "w is truncated"),
        (Cluster(Files(), refused("config.json of /m cannot be read")), "config.json of /m cannot be read"),
        (Cluster(Files(here=ZeroDivisionError("odd"))), "ZeroDivisionError: odd"),
    ],
)
def test_where_nobody_knows_it_says_why(cluster: Cluster, said: str) -> None:
    found = cluster.needs("/models/m")
    assert isinstance(found, Failure)
    assert said in found.message


def test_the_size_of_weights_on_this_machine_is_known_whatever_else_is_not(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    inspection = Inspection(Knowledge())
    sizes = {str(tmp_path): 1000, "/nowhere": 0, "org/model": 0, "~no-such-user-here/model": 0, "a\0b": 0}
    assert {model: anyio.run(inspection.weights_bytes, model) for model in sizes} == sizes


def test_an_address_that_swallows_everything_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_SILENT_SECONDS", 0.01)
    cluster = Cluster(Files(), Inspected(needs=NEEDS), dead=("10.9.0.1", "10.9.0.2"))
    monkeypatch.setattr(inspection, "_NODES_SECONDS", 10.0)
    assert cluster.needs() == Needs(needs=NEEDS, seen_by=NodeId("n1"))


def test_a_share_that_hangs_takes_a_few_threads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    begun: list[str] = []

    def hang(*_: object) -> int:
        begun.append("look")
        free.wait(20)
        return 0

    async def ask_often() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(12):
                group.start_soon(cluster._inspection.needs, "/share/m", None, cluster._state)
                group.start_soon(cluster._inspection.weights_bytes, "/share/m")

    cluster = Cluster(Files())
    monkeypatch.setattr(cluster._inspection._survey, "here", hang)
    monkeypatch.setattr(inspection, "_weights_bytes", hang)
    monkeypatch.setattr(inspection, "_HERE_SECONDS", 0.1)
    try:
        anyio.run(ask_often)
        assert 1 <= len(begun) <= inspection._AT_ONCE
    finally:
        free.set()
