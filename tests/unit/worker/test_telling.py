"""What is told of a machine, and when: at once where it matters, seldom where it only moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import msgspec
import pytest

from muster.bus import ControlClient, Follower, Outbox
from muster.errors import FetchError, RequestError
from muster.events import Event, NodeChanged, kind_of
from muster.facts import Gpu, HeldModel, Interface, NodeFacts, ThunderboltPort
from muster.fetch.looks import Looks
from muster.probe.collect import Subject
from muster.protocol import TellFacts
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo
from muster.worker import telling
from muster.worker.telling import Teller

GIB = 2**30
LAN = NodeAddress(host="10.0.0.9", network="10.0.0.0/24")
CABLE = NodeAddress(host="169.254.3.4", network="169.254.0.0/16")
SUBJECT = Subject(node=NodeId("a"), boot=BootId("b1"))


class Machine:
    """What a test says of the machine, and what is told of it: stands for client, outbox and follower."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.available = 50 * GIB
        self.interfaces: tuple[Interface, ...] = (Interface(name="eth0", kind="ethernet", up=True, addresses=(LAN,)),)
        self.models: tuple[HeldModel, ...] = ()
        self.gpus: tuple[Gpu, ...] = ()
        self.wired = 90 * GIB
        self.used = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.collected = 0
        self.broken = False
        self.sent: list[NodeFacts] = []
        self.reported: list[Event] = []
        self.introduced: list[NodeInfo] = []
        self.limit = 1_000_000
        self.looked = anyio.Event()

    def send(self, request: TellFacts) -> int:
        if len(msgspec.msgpack.encode(request)) > self.limit:
            raise RequestError("too large")
        self.sent.append(request.facts)
        return 1

    def report(self, event: Event, cause: int) -> None:
        self.reported.append(event)

    def introduce(self, info: NodeInfo) -> None:
        self.introduced.append(info)

    def glance(self) -> object:
        if self.broken:
            self.looked.set()
            raise OSError("Too many open files")
        return self.interfaces

    def collect(self, subject: Subject, tools: object) -> NodeFacts:
        self.collected += 1
        return NodeFacts(
            node=subject.node,
            boot=subject.boot,
            memory_total_bytes=100 * GIB,
            memory_available_bytes=self.available,
            interfaces=self.interfaces,
            memory_gbps=subject.memory_gbps,
            gpus=self.gpus,
            wired_limit_bytes=90 * GIB,
        )

    def refresh(self, facts: NodeFacts, subject: Subject, tools: object) -> NodeFacts:
        self.meanwhile()
        return msgspec.structs.replace(facts, memory_available_bytes=self.available)

    def look_at_gpu(self, facts: NodeFacts, tools: object) -> NodeFacts:
        return msgspec.structs.replace(facts, wired_limit_bytes=self.wired)

    def virtual_memory(self) -> Machine:
        return self


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    found = Machine()
    monkeypatch.setattr(telling, "glance", found.glance)
    monkeypatch.setattr(telling, "interfaces", lambda: found.interfaces)
    monkeypatch.setattr(telling, "collect", found.collect)
    monkeypatch.setattr(telling, "refresh", found.refresh)
    monkeypatch.setattr(telling, "look_at_gpu", found.look_at_gpu)
    monkeypatch.setattr(telling.psutil, "virtual_memory", found.virtual_memory)
    monkeypatch.delenv(telling.TESTING_FACTS, raising=False)
    yield found


def teller(machine: Machine, *, given: bool = False) -> Teller:
    info = NodeInfo(
        node=NodeId("a"),
        boot=BootId("b1"),
        hostname="h",
        machine="m",
        pid=1,
        addresses=(LAN,),
        backends=(),
        memory_bytes=1,
        max_ranks=1,
        addresses_given=given,
        candidates=(LAN,),
    )
    return Teller(
        info,
        SUBJECT,
        cast(ControlClient, machine),
        cast(Outbox, machine),
        cast(Follower, machine),
        held=lambda: machine.models,
        used=lambda: machine.used,
        clock=lambda: machine.seconds,
    )


def look(one: Teller, machine: Machine, seconds: float = telling.POLL_SECONDS) -> None:
    machine.seconds += seconds

    async def once() -> None:
        await one._look_at_addresses()
        await one._look_at_machine()
        await one._look_at_gpu()
        await one._look_for_models()

    anyio.run(once)


def test_the_facts_are_told_once_and_again_only_when_asked(machine: Machine) -> None:
    one = teller(machine)
    one.tell()
    assert machine.sent == []
    for _ in range(5):
        look(one, machine)
    assert [facts.n for facts in machine.sent] == [1]
    assert machine.collected == 1
    one.tell()
    assert [facts.n for facts in machine.sent] == [1, 1]
    assert machine.reported == []


def test_memory_is_told_when_it_has_moved_far(machine: Machine) -> None:
    one = teller(machine)
    look(one, machine)
    machine.available -= 4 * GIB
    look(one, machine, 6)
    assert len(machine.sent) == 1
    machine.available -= 2 * GIB
    look(one, machine, 2)
    assert len(machine.sent) == 1, "not before the next look at memory"
    look(one, machine, 6)
    assert [(facts.n, facts.memory_available_bytes) for facts in machine.sent] == [(1, 50 * GIB), (2, 44 * GIB)]
    assert machine.collected == 1, "the slow tools are not run for that"


def test_an_address_that_goes_and_comes_back_is_an_event_each_time_but_not_many_a_second(machine: Machine) -> None:
    one = teller(machine)
    look(one, machine)
    before = machine.interfaces
    machine.interfaces = (
        Interface(name="eth0", kind="ethernet", up=True, addresses=()),
        Interface(name="tb", kind="thunderbolt", up=True, addresses=(CABLE,)),
    )
    look(one, machine)
    change = NodeChanged(
        node=NodeId("a"), boot=BootId("b1"), candidates=(CABLE,), gone=("10.0.0.9",), new=("169.254.3.4",)
    )
    assert machine.reported == [change]
    assert [info.candidates for info in machine.introduced] == [(CABLE,)]
    assert machine.sent[-1].interfaces == machine.interfaces, "the facts are told at once"
    machine.interfaces = before
    look(one, machine)
    assert len(machine.reported) == 1
    look(one, machine, 4)
    assert machine.reported[1:] == [
        NodeChanged(node=NodeId("a"), boot=BootId("b1"), candidates=(LAN,), gone=("169.254.3.4",), new=("10.0.0.9",))
    ]
    assert one.info.candidates == (LAN,)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (Interface(name="wlan0", kind="wifi", up=True, addresses=(LAN,), mbps=600), "wlan0 (wifi)"),
        (Interface(name="eth0", kind="wifi", up=True, addresses=(LAN,)), "eth0 (wifi)"),
        (Interface(name="eth0", kind="ethernet", up=True, addresses=(LAN,), mbps=100), "eth0 (ethernet, 100 Mbit/s)"),
    ],
)
def test_an_address_that_stays_on_another_interface_kind_or_speed_is_an_event(
    machine: Machine, now: Interface, told: str
) -> None:
    one = teller(machine)
    machine.interfaces = (msgspec.structs.replace(machine.interfaces[0], mbps=10_000),)
    look(one, machine)
    look(one, machine)
    assert machine.reported == []
    machine.interfaces = (now,)
    look(one, machine)
    (change,) = machine.reported
    assert change == NodeChanged(
        node=NodeId("a"),
        boot=BootId("b1"),
        candidates=(LAN,),
        moved=(f"10.0.0.9: eth0 (ethernet, 10000 Mbit/s) → {told}",),
    )
    assert machine.introduced == [], "its addresses are the same"
    look(one, machine, 6)
    assert len(machine.reported) == 1


def test_further_addresses_are_no_event_where_the_operator_gave_them(machine: Machine) -> None:
    one = teller(machine, given=True)
    machine.interfaces = (*machine.interfaces, Interface(name="tb", kind="thunderbolt", up=True, addresses=(CABLE,)))
    look(one, machine)
    assert machine.reported == []
    machine.interfaces = machine.interfaces[1:]
    look(one, machine, 6)
    assert [event.gone for event in machine.reported if isinstance(event, NodeChanged)] == [("10.0.0.9",)]


def test_models_are_looked_for_now_and_then_and_when_asked(machine: Machine) -> None:
    one = teller(machine)
    look(one, machine)
    machine.models = (HeldModel(model="x/y", path="/models/y"),)
    look(one, machine)
    assert machine.sent[-1].models == ()
    one.scan_soon()
    look(one, machine)
    assert machine.sent[-1].models == machine.models
    machine.interfaces = ()
    look(one, machine)
    assert machine.sent[-1].models == machine.models, "a probe of the machine keeps them"
    machine.models = ()
    look(one, machine, 61)
    assert machine.sent[-1].models == ()


def test_facts_that_are_too_large_are_told_without_models(machine: Machine) -> None:
    one = teller(machine)
    machine.models = tuple(HeldModel(model=f"x/{number}", path="/models") for number in range(100))
    machine.limit = 2_000
    look(one, machine)
    assert one.facts is not None
    assert len(one.facts.models) == 100
    assert (machine.sent[-1].n, machine.sent[-1].models) == (2, ())


def test_a_machine_that_cannot_be_looked_at_is_looked_at_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = teller(machine)
    machine.broken = True

    async def both() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(one.run)
            with anyio.fail_after(10):
                await machine.looked.wait()
                assert one.facts is None
                machine.broken = False
                await one.wait_change()
            group.cancel_scope.cancel()

    monkeypatch.setattr(telling, "POLL_SECONDS", 0.01)
    anyio.run(both)
    assert machine.collected == 1


def test_a_test_may_say_what_a_machine_has(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(telling.TESTING_FACTS, str(tmp_path / "{node}.json"))
    one = teller(machine)
    look(one, machine)
    assert machine.sent[-1].thunderbolt == ()
    port = ThunderboltPort(port="1", domain="A1", peer_domain="B1", generation=5, interface="en2")
    (tmp_path / "a.json").write_bytes(msgspec.json.encode({"thunderbolt": [port], "chip": "Apple M4 Max"}))
    look(one, machine)
    assert (machine.sent[-1].thunderbolt, machine.sent[-1].chip) == ((port,), "Apple M4 Max")
    assert machine.sent[-1].interfaces == machine.interfaces


def test_models_that_cannot_be_told_are_left_out_and_a_scan_that_hangs_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = HeldModel(model="good", path="/m/good", bytes=1, complete=True)
    odd = msgspec.structs.replace(good, model="odd", path="/m/\udc80")
    large = msgspec.structs.replace(good, model="large", path="/m/large", bytes=2**65)
    machine.models = (good, large, odd)
    one = teller(machine)
    look(one, machine)
    assert machine.sent[-1].models == (good,)
    assert "'/m/large', '/m/\\udc80'" in machine.sent[-1].unknown["models"]
    free = threading.Event()
    monkeypatch.setattr(telling, "_SCANNING_SECONDS", 0.05)
    monkeypatch.setattr(one, "_held", lambda: (free.wait(20), ())[1])
    look(one, machine, telling._SCAN_SECONDS)
    free.set()
    assert machine.sent[-1].models == (good,)
    assert "models could not be read" in machine.sent[-1].unknown["models"]


def test_facts_that_cannot_be_told_end_nothing(machine: Machine) -> None:
    one = teller(machine)
    look(one, machine)
    assert one.facts is not None
    odd = HeldModel(model="odd", path="/m/\udc80", bytes=1, complete=True)
    one.facts = msgspec.structs.replace(one.facts, models=(odd,))
    one.tell()
    assert machine.sent[-1].models == ()


def test_a_disk_that_hangs_hides_no_address_that_goes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = teller(machine)
    free = threading.Event()
    changed = anyio.Event()

    def hang(*_: object) -> None:
        free.wait(20)

    def report(event: Event, cause: int) -> None:
        machine.reported.append(event)
        changed.set()

    async def pulled() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(one.run)
            await anyio.lowlevel.checkpoint()
            machine.interfaces = (Interface(name="usb0", kind="ethernet", up=True, addresses=(CABLE,)),)
            with anyio.fail_after(10):
                await changed.wait()
            group.cancel_scope.cancel()

    for name in ("collect", "refresh", "_moved"):
        monkeypatch.setattr(telling, name, hang)
    monkeypatch.setattr(one, "_held", hang)
    monkeypatch.setattr(machine, "report", report)
    monkeypatch.setattr(telling, "POLL_SECONDS", 0.01)
    try:
        anyio.run(pulled)
    finally:
        free.set()
    assert [kind_of(event) for event in machine.reported] == ["node.changed"]


def test_a_look_that_hangs_is_given_up_and_one_later_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = teller(machine)
    free = threading.Event()

    def hang(*_: object) -> NodeFacts:
        free.wait(20)
        raise OSError("stale file handle")

    monkeypatch.setattr(telling, "collect", hang)
    monkeypatch.setattr(telling, "_COLLECTING_SECONDS", 0.05)
    with pytest.raises(FetchError, match="this machine"):
        anyio.run(one._look_at_machine)
    free.set()
    monkeypatch.setattr(telling, "collect", machine.collect)
    monkeypatch.setattr(telling, "_COLLECTING_SECONDS", 10.0)
    one._machine = Looks(1)  # the one before belongs to a loop that has ended
    look(one, machine)
    assert machine.sent[-1].n == 1


def test_what_the_gpu_may_have_is_told_soon_after_it_changed(machine: Machine) -> None:
    machine.gpus = (Gpu(name="Apple M4 Max"),)
    one = teller(machine)
    look(one, machine)
    machine.wired = 110 * GIB
    look(one, machine)
    assert len(machine.sent) == 1
    look(one, machine, telling._GPU_SECONDS)
    assert machine.sent[-1].wired_limit_bytes == 110 * GIB
    machine.wired = 70 * GIB
    one.look_soon()
    look(one, machine)
    assert machine.sent[-1].wired_limit_bytes == 70 * GIB
    assert machine.collected == 1, "the slow tools are not run for that"


def test_what_ranks_had_in_use_is_told_as_it_was_when_the_gpu_was_looked_at(machine: Machine) -> None:
    machine.gpus = (Gpu(name="RTX", memory_bytes=24 * GIB, free_bytes=20 * GIB),)
    one = teller(machine)
    look(one, machine)
    assert machine.sent[-1].gpu_ranks_bytes == 0
    machine.used = 8 * GIB
    machine.available -= 20 * GIB
    look(one, machine, telling._REFRESH_SECONDS)
    assert machine.sent[-1].memory_available_bytes == machine.available
    assert machine.sent[-1].gpu_ranks_bytes == 0, "memory was looked at, not the GPU"
    machine.wired -= GIB
    one.look_soon()
    look(one, machine)
    assert machine.sent[-1].gpu_ranks_bytes == 8 * GIB


def test_what_was_measured_while_memory_was_looked_at_stays(machine: Machine) -> None:
    one = teller(machine)
    look(one, machine)
    machine.meanwhile = lambda: one.measured(400.0)
    machine.available -= 20 * GIB
    look(one, machine, telling._REFRESH_SECONDS)
    assert machine.sent[-1].memory_available_bytes == machine.available
    assert machine.sent[-1].memory_gbps == 400.0


def test_of_the_speeds_that_were_measured_the_best_is_told(machine: Machine) -> None:
    one = teller(machine)
    one.measured(100.0)
    look(one, machine)
    assert machine.sent[-1].memory_gbps == 100.0
    one.measured(40.0)
    assert len(machine.sent) == 1
    one.measured(400.0)
    assert [facts.memory_gbps for facts in machine.sent] == [100.0, 400.0]
    machine.interfaces = ()
    look(one, machine)
    assert machine.sent[-1].memory_gbps == 400.0, "a probe of the machine keeps it"
