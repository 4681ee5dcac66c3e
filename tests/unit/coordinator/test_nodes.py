"""A restarted worker is let in at once; a second worker under a live node's id never takes it over."""

from __future__ import annotations

import msgspec
import pytest
from books import A, Books, info

from muster.coordinator.nodes import Admission, Registrar
from muster.events import NodeLost
from muster.lifecycle import SECOND, Settings
from muster.protocol import Hello
from muster.spec import BootId, Failure, NodeAddress, NodeId, NodeInfo
from muster.state import State

NOW = 1_000 * SECOND


def admit(
    registrar: Registrar,
    node: NodeInfo,
    state: State,
    *,
    heard_ns: int | None = NOW,
    now_ns: int = NOW,
    proof: str = "",
) -> Admission | Failure:
    return registrar.admit(Hello(info=node, proof=proof), state, heard_ns, now_ns)


@pytest.fixture
def registrar() -> Registrar:
    return Registrar(Settings(lease_seconds=5.0))


@pytest.fixture
def state() -> State:
    """Node a has joined with boot-1."""
    return Books("a").ledger.state


def test_a_new_node_joins(registrar: Registrar, state: State) -> None:
    assert admit(registrar, info("b"), state) == Admission(joins=True)


def test_a_reconnect_is_no_news_unless_something_changed(registrar: Registrar, state: State) -> None:
    assert admit(registrar, info(), state) == Admission(joins=False)
    assert admit(registrar, msgspec.structs.replace(info(), max_ranks=3), state) == Admission(joins=True)


def test_a_lost_node_comes_back_with_any_boot(registrar: Registrar) -> None:
    books = Books("a")
    books.ledger.commit(NodeLost(node=A, boot=BootId("boot-1"), reason="lease"))
    assert admit(registrar, info(boot="boot-2"), books.ledger.state) == Admission(joins=True)
    doubt = admit(registrar, info(), books.ledger.state)
    assert isinstance(doubt, Admission)
    assert doubt.proof
    assert admit(registrar, info(), books.ledger.state, proof=doubt.proof) == Admission(joins=True)


def test_a_lost_boot_that_hears_nothing_stays_lost(registrar: Registrar) -> None:
    """Its hellos arrive and no answer reaches it: let in, it would be lost again after every lease."""
    books = Books("a")
    books.ledger.commit(NodeLost(node=A, boot=BootId("boot-1"), reason="lease"))
    for proof in ("", "", "0000"):
        doubt = admit(registrar, info(), books.ledger.state, proof=proof)
        assert isinstance(doubt, Admission)
        assert not doubt.joins
        assert doubt.proof


def test_a_worker_that_proves_that_it_replaces_the_old_one_joins_at_once(registrar: Registrar, state: State) -> None:
    admission = admit(registrar, info(boot="boot-2", replaces="boot-1"), state)
    assert admission == Admission(joins=True, lost="its worker was started again")
    other = admit(registrar, info(boot="boot-2", replaces="boot-0"), state)
    assert isinstance(other, Failure), "the boot that it replaces is not the one that holds the name"


def test_a_second_worker_is_put_off_and_then_refused_for_good(registrar: Registrar, state: State) -> None:
    second = info(boot="boot-2")
    for seconds in (0.0, 3.0, 6.0):
        now = NOW + round(seconds * SECOND)
        refused = admit(registrar, second, state, heard_ns=now - SECOND, now_ns=now)
        assert isinstance(refused, Failure)
        assert refused.retryable, "the holder may be dead and its lease not yet over"
    now = NOW + 7 * SECOND
    refused = admit(registrar, second, state, heard_ns=now - SECOND, now_ns=now)
    assert isinstance(refused, Failure)
    assert not refused.retryable
    assert refused.message == "node a is already run by process 4711 on host-of-a"
    assert "--node-id" in refused.remedy


@pytest.mark.parametrize("heard_ns", [None, NOW])
def test_while_the_holder_is_silent_the_newcomer_keeps_trying(
    registrar: Registrar, state: State, heard_ns: int | None
) -> None:
    for seconds in (0, 30, 60):
        refused = admit(registrar, info(boot="boot-2"), state, heard_ns=heard_ns, now_ns=NOW + (10 + seconds) * SECOND)
        assert isinstance(refused, Failure)
        assert refused.retryable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node": NodeId("")}, "the node id ''"),
        ({"node": NodeId("a b")}, "'a b'"),
        ({"node": NodeId("-a")}, "'-a'"),
        ({"node": NodeId("x" * 64)}, "1 to 63"),
        ({"node": NodeId("a\n")}, "the node id"),
        ({"boot": BootId("")}, "boot is empty"),
        ({"addresses": ()}, "node b has no address"),
        ({"candidates": (NodeAddress(host="fe80::1", network="fe80::/64"),)}, "not IPv4, or too many"),
        ({"candidates": (NodeAddress(host="10.0.0.1", network="10.0.0.0/24"),) * 513}, "not IPv4, or too many"),
        ({"candidates": (NodeAddress(host="999.1.1.1", network="10.0.0.0/24"),)}, "not IPv4, or too many"),
        ({"addresses": (NodeAddress(host="\u0661\u0660.0.0.1", network="10.0.0.0/24"),)}, "not IPv4, or too many"),
        ({"peer_port": 70_000}, "peer_port 70000"),
        ({"peer_port": -1}, "peer_port -1"),
        ({"max_ranks": 0}, "max_ranks 0"),
        ({"memory_bytes": -1}, "memory_bytes -1"),
    ],
)
def test_a_malformed_hello_is_refused(
    registrar: Registrar, state: State, change: dict[str, object], message: str
) -> None:
    refused = admit(registrar, msgspec.structs.replace(info("b"), **change), state)
    assert isinstance(refused, Failure)
    assert (refused.kind, refused.retryable) == ("request-invalid", False)
    assert message in refused.message


@pytest.mark.parametrize("name", ["a", "mac-1.local", "0", "A_b", "x" * 63])
def test_ordinary_names_are_fine(registrar: Registrar, state: State, name: str) -> None:
    assert admit(registrar, info(name, boot="boot-1"), State()) == Admission(joins=True)
    del state
