"""What a node measures, of whom, and when: between real peer servers on loopback addresses."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import msgspec
import pytest

from muster.bus.peer import PeerConnection
from muster.errors import RequestError
from muster.links import Measured, NodeLinks
from muster.peer_protocol import DialBack, DialledBack, Watch
from muster.protocol import TellLinks
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.state import Node, State
from muster.worker import measuring, pairs
from muster.worker.measuring import MAXIMUM_PINGED, Measurer
from muster.worker.pairs import pairs_of
from muster.worker.peer import PeerServer
from muster.worker.ports import PortRange

NETWORK = "127.0.0.0/8"


@pytest.fixture(autouse=True)
def beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback addresses stand for those of machines, and what fails is tried again soon."""
    monkeypatch.setattr(pairs, "is_loopback", _never)
    monkeypatch.setattr(measuring, "_RETRY_SECONDS", (0.05,))


def _never(host: str) -> bool:
    del host
    return False


class Machine:
    """A worker as far as links go, at an address of its own."""

    def __init__(self, name: str, last: int, *, answers: bool = True) -> None:
        self.node, self.boot = NodeId(name), BootId(f"boot of {name}")
        self.host = f"127.0.0.{last}"
        self.peers = PeerServer(self.node, self.boot)
        port = self.peers.listen([NodeAddress(host=self.host, network=NETWORK)])
        self.info = info(name, self.host, port)
        self.told: list[NodeLinks] = []
        self.news = anyio.Event()
        self.measurer = Measurer(self.info, self.peers, self._send)
        self._answers = answers

    def _send(self, request: TellLinks) -> None:
        self.told.append(request.links)
        self.news.set()
        self.news = anyio.Event()

    def start(self, group: anyio.abc.TaskGroup) -> None:
        if self._answers:
            group.start_soon(self.peers.run)
        group.start_soon(self.measurer.run)

    async def until(self, holds: Callable[[NodeLinks], bool]) -> NodeLinks:
        while not self.told or not holds(self.told[-1]):
            await self.news.wait()
        return self.told[-1]


def info(name: str, host: str, port: int, network_id: str = "", network: str = NETWORK) -> NodeInfo:
    address = NodeAddress(host=host, network=network)
    return NodeInfo(
        node=NodeId(name),
        boot=BootId(f"boot of {name}"),
        hostname=name,
        machine=name,
        pid=1,
        addresses=(address,),
        candidates=(address,),
        backends=("ring",),
        memory_bytes=1,
        max_ranks=1,
        peer_port=port,
        network_id=network_id or name,
    )


def state(*infos: NodeInfo, lost: str | None = None) -> State:
    return State(nodes={one.node: Node(info=one, since_ns=0, lost=lost) for one in infos})


def run(work: Callable[[anyio.abc.TaskGroup], Awaitable[None]]) -> None:
    async def limited() -> None:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                await work(group)
                group.cancel_scope.cancel()

    anyio.run(limited)


def only(links: NodeLinks) -> Measured:
    (one,) = links.measured
    return one


def reached(links: NodeLinks) -> bool:
    return bool(links.measured) and all(one.reached and one.dialled_back for one in links.measured)


def test_both_ends_measure_and_one_of_them_the_rates() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        machines = Machine("a", 2), Machine("b", 3)
        for machine in machines:
            machine.start(group)
            machine.measurer.see(state(*(one.info for one in machines)))
        found = [only(await machine.until(reached)) for machine in machines]
        assert [(one.own, one.host) for one in found] == [("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.2")]
        assert all(one.rtt_us is not None and 0 < one.rtt_us < 1e6 for one in found)
        rated = [one for one in found if one.mbps_out is not None]
        assert len(rated) == 1
        assert rated[0].mbps_in is not None
        assert min(rated[0].mbps_in, rated[0].mbps_out or 0) > 10

    run(work)


def test_a_round_measures_again_and_another_coordinator_counts_from_nothing() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2), Machine("b", 3)
        a.start(group)
        group.start_soon(b.peers.run)
        a.measurer.see(state(a.info, b.info))
        await a.until(reached)
        a.measurer.hear(3)
        await a.until(lambda links: links.round == 3)
        count = len(a.told)
        a.measurer.tell()
        assert a.told[-1] == a.told[count - 1]
        a.measurer.hear(0)
        await a.until(lambda links: links.round == 0)
        a.measurer.hear(1)
        assert reached(await a.until(lambda links: links.round == 1))

    run(work)


def test_a_node_without_others_answers_a_round_and_one_without_a_port_measures_nothing() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        alone = Machine("a", 2)
        alone.start(group)
        alone.measurer.see(state(alone.info))
        alone.measurer.hear(1)
        assert (await alone.until(lambda links: links.round == 1)).measured == ()
        portless = Measurer(alone.info, PeerServer(alone.node, alone.boot), lambda request: None)
        portless.see(state(alone.info, info("b", "127.0.0.3", 1)))
        await portless.run()

    run(work)


def test_what_is_not_reached_is_tried_until_it_is_and_a_link_that_breaks_is_seen() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = leading("a", "b")
        a.start(group)
        a.measurer.see(state(a.info, msgspec.structs.replace(b.info, peer_port=1)))
        failed = only(await a.until(lambda links: bool(links.measured)))
        assert (failed.reached, failed.error) == (
            False,
            f"{b.host}:1 cannot be reached from {a.host}: Connection refused",
        )
        a.measurer.see(state(a.info, lost="gone"))
        async with anyio.create_task_group() as others:
            others.start_soon(b.peers.run)
            a.measurer.see(state(a.info, b.info))
            await a.until(reached)
            others.cancel_scope.cancel()
        broken = only(await a.until(lambda links: not reached(links)))
        assert not broken.reached

    run(work)


def test_a_node_that_answers_later_is_found_without_any_event() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2), Machine("b", 3)
        port = b.peers.port
        b.peers.close()
        a.start(group)
        a.measurer.see(state(a.info, b.info))
        await a.until(lambda links: bool(links.measured) and not reached(links))
        assert b.peers.listen(b.info.candidates, PortRange(port, port)) == port
        group.start_soon(b.peers.run)
        await a.until(reached)

    run(work)


def leading(one: str, other: str) -> tuple[Machine, Machine]:
    """Two machines of which the first sends the bursts and watches."""
    leads = pairs.leads(NodeId(one), NodeId(other))
    first, second = (one, other) if leads else (other, one)
    return Machine(first, 2), Machine(second, 3)


def test_a_rate_that_could_not_be_measured_is_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end is in a burst for as long as this one waits for its turn, the first time."""

    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = leading("a", "b")
        group.start_soon(b.peers.run)
        await b.peers.bursting.acquire()
        a.start(group)
        a.measurer.see(state(a.info, b.info))
        assert only(await a.until(reached)).mbps_out is None
        b.peers.bursting.release()
        rated = only(await a.until(lambda links: bool(links.measured[0].mbps_out)))
        assert rated.mbps_in

    monkeypatch.setattr(measuring, "_TURN_SECONDS", 0.02)
    run(work)


def test_both_ends_measure_again_when_the_watch_of_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        leads, follows = leading("a", "b")
        machines = (leads, follows)
        watched = anyio.Event()
        watch = follows.peers._watch  # pyright: ignore[reportPrivateUsage]

        async def noted(request: Watch, connection: PeerConnection) -> None:
            watched.set()
            await watch(request, connection)

        follows.peers.handle(Watch, noted)
        follows.start(group)
        async with anyio.create_task_group() as others:
            leads.start(others)
            for machine in machines:
                machine.measurer.see(state(*(one.info for one in machines)))
            await follows.until(reached)
            await leads.until(reached)
            await watched.wait()
            others.cancel_scope.cancel()
        await follows.until(lambda links: not reached(links))

    monkeypatch.setattr(measuring, "_STABLE_SECONDS", 0.0)
    run(work)


class Verbose(PeerServer):
    """Says why it cannot dial back, at length."""

    async def _dial_back(self, request: DialBack, connection: PeerConnection) -> DialledBack:
        return DialledBack(reached=False, error="no " * 500_000)


def test_a_long_reason_of_another_node_is_cut_and_left_out_where_it_is_too_much() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = leading("a", "b")
        b.peers.close()
        verbose = Verbose(b.node, b.boot)
        port = verbose.listen([NodeAddress(host=b.host, network=NETWORK)])
        group.start_soon(verbose.run)
        a.start(group)
        a.measurer.see(state(a.info, info(b.node, b.host, port)))
        found = only(await a.until(lambda links: bool(links.measured)))
        assert found.error.startswith("no no no")
        assert len(found.error) < 2_000

        def refuse(request: TellLinks) -> None:
            if any(one.error for one in request.links.measured):
                raise RequestError("too large")
            a.told.append(request.links)

        a.measurer._send = refuse  # pyright: ignore[reportPrivateUsage]
        a.measurer.tell()
        assert only(a.told[-1]) == msgspec.structs.replace(found, error="")

    run(work)


def test_a_link_that_does_not_go_back_is_told_with_the_reason() -> None:
    """`b` cannot dial `a`: nobody listens at the port that `a` says it has."""

    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2, answers=False), Machine("b", 3)
        group.start_soon(b.peers.run)
        port = a.peers.port
        a.peers.close()
        a.measurer = Measurer(a.info, Claims(port), a._send)  # pyright: ignore[reportPrivateUsage]
        a.start(group)
        a.measurer.see(state(a.info, b.info))
        found = only(await a.until(lambda links: bool(links.measured)))
        assert (found.reached, found.dialled_back) == (True, False)
        assert found.error == f"127.0.0.2:{port} cannot be reached from 127.0.0.3: Connection refused"

    run(work)


class Claims(PeerServer):
    """Says that it has a port."""

    def __init__(self, port: int) -> None:
        super().__init__(NodeId("a"), BootId("boot of a"))
        self._claimed = port

    @property
    def port(self) -> int:
        return self._claimed


def test_another_node_at_the_address_and_an_address_of_both_are_named() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2), Machine("b", 3)
        a.start(group)
        group.start_soon(b.peers.run)
        a.measurer.see(state(a.info, msgspec.structs.replace(b.info, node=NodeId("c"))))
        found = only(await a.until(lambda links: bool(links.measured)))
        assert "node b answers at 127.0.0.3, which node c offers: two nodes behind the same address" in found.error
        a.measurer.see(state(a.info, info("d", a.host, 1)))
        found = only(await a.until(lambda links: links.measured[0].other == "d"))
        assert found.error == "nodes a and d both have the address 127.0.0.2"

    run(work)


def test_while_nothing_happens_nothing_is_told_and_nobody_else_is_measured() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2), Machine("b", 3)
        for machine in (a, b):
            machine.start(group)
            machine.measurer.see(state(a.info, b.info, info("same", "127.0.0.9", 1, network_id=machine.node)))
        await a.until(reached)
        await b.until(reached)
        told = len(a.told), len(b.told)
        a.measurer.hear(0)
        a.measurer.see(state(a.info, b.info))
        await anyio.sleep(0.1)
        assert (len(a.told), len(b.told)) == told

    run(work)


def test_pairs_are_those_of_common_networks_and_the_first_of_each() -> None:
    a, b = info("a", "10.0.0.1", 1, network="10.0.0.0/24"), info("b", "10.0.0.2", 1, network="10.0.0.0/24")
    assert pairs_of(a, b) == (("10.0.0.1", "10.0.0.2"),)
    far = info("c", "10.1.0.2", 1, network="10.1.0.0/24")
    assert pairs_of(a, far) == (("10.0.0.1", "10.1.0.2"),)
    both = msgspec.structs.replace(far, candidates=(*far.candidates, *b.candidates))
    assert pairs_of(a, both) == (("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.1.0.2"))


def having(name: str, *addresses: tuple[str, str]) -> NodeInfo:
    found = tuple(NodeAddress(host=host, network=network) for host, network in addresses)
    return msgspec.structs.replace(info(name, found[0].host, 1), addresses=found[:1], candidates=found)


def test_two_sites_with_the_same_private_network_are_joined_by_their_vpn() -> None:
    a, b = (
        having(name, (f"192.168.1.{last}", "192.168.1.0/24"), (f"100.64.0.{last}", f"100.64.0.{last}/32"))
        for name, last in (("a", 5), ("b", 7))
    )
    assert pairs_of(a, b) == (("192.168.1.5", "192.168.1.7"), ("100.64.0.5", "100.64.0.7"))


def test_routed_networks_are_measured_beside_a_network_in_common() -> None:
    a, b = (
        having(name, (f"10.{last}.0.5", f"10.{last}.0.0/24"), (f"192.168.1.{last}", "192.168.1.0/24"))
        for name, last in (("a", 1), ("b", 2))
    )
    assert pairs_of(a, b) == (("192.168.1.1", "192.168.1.2"), ("10.1.0.5", "10.2.0.5"))
    cable = having("c", ("169.254.3.4", "169.254.0.0/16"), ("10.3.0.5", "10.3.0.0/24"))
    assert pairs_of(a, cable) == (("10.1.0.5", "10.3.0.5"),), "no router passes link-local addresses on"


def test_what_routing_does_not_join_is_not_tried_for_ever_where_another_pair_works() -> None:
    async def work(group: anyio.abc.TaskGroup) -> None:
        a, b = Machine("a", 2), Machine("b", 3)
        a.start(group)
        group.start_soon(b.peers.run)
        nowhere = NodeAddress(host="127.0.0.9", network="127.0.9.0/24")
        far = msgspec.structs.replace(b.info, candidates=(nowhere, *b.info.candidates))
        a.measurer.see(state(a.info, far))
        found = await a.until(lambda links: any(one.reached for one in links.measured))
        assert [(one.host, one.reached) for one in found.measured] == [("127.0.0.3", True), ("127.0.0.9", False)]
        other = a.measurer._others[NodeId("b")]  # pyright: ignore[reportPrivateUsage]
        assert (other.due, other.failures) == (math.inf, 0)
        assert other.once == {("127.0.0.2", "127.0.0.3")}, "what has worked is waited for when it breaks"
        other.once.add(("127.0.0.2", "127.0.0.9"))
        a.measurer.hear(1)
        await a.until(lambda links: links.round == 1)
        assert other.failures > 0
        a.measurer.see(state(a.info, msgspec.structs.replace(b.info, candidates=(nowhere,))))
        await a.until(lambda links: not any(one.reached for one in links.measured))
        assert other.due < math.inf, "where it is the only way, it is waited for"

    run(work)


def test_in_a_large_cluster_each_node_measures_some_and_sees_changes_cheaply() -> None:
    infos = [info(f"n{number}", f"10.0.{number // 250}.{number % 250 + 1}", 1) for number in range(1_000)]
    measurer = Measurer(infos[0], PeerServer(infos[0].node, infos[0].boot), lambda request: None)
    seen = state(*infos)
    begin = time.process_time()
    for _ in range(100):
        measurer.see(seen)
    assert time.process_time() - begin < 1
    assert len(measurer._others) == MAXIMUM_PINGED  # pyright: ignore[reportPrivateUsage]
    leads = [sum(pairs.leads(one.node, other.node) for other in infos if other is not one) for one in infos[:50]]
    assert all(math.isclose(count, 500, rel_tol=0.2) for count in leads)
