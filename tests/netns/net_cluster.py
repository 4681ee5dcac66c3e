"""A coordinator and workers on the hosts of a bed, and clients that speak to them from there."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import control_relay
import msgspec
import psutil
from bed import Bed

from muster.bus import parse_endpoint
from muster.events import Envelope, Event, Unknown, decode_envelope
from muster.links import LinkMap
from muster.local import LocalCluster, Member
from muster.protocol import AnyRequest, Create, Delete, Generate, Get, Query
from muster.replies import AnyReply, Chunk, Created, Done, Found, Snapshot
from muster.sampling import Message
from muster.spec import Deadlines, GroupWorkload, InstanceId, InstanceSpec, NodeId
from muster.state import Broken, Instance, Rank, Running, State, all_gone

#: Clocks that make the loss of a node a matter of a second; the default of a `NetCluster`.
HEARTBEAT_SECONDS: Final = 0.2
LEASE_SECONDS: Final = 1.0
#: How long anything may take that has no deadline of its own: two shared cores may be busy.
PATIENCE_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_replies_decoder: Final = msgspec.msgpack.Decoder(list[AnyReply])
_state_decoder: Final = msgspec.msgpack.Decoder(State)


def group(*nodes: str, form_seconds: float = 15.0) -> InstanceSpec:
    """A bare group with its ranks on these nodes, in this order."""
    return InstanceSpec(
        workload=GroupWorkload(),
        ranks=len(nodes),
        nodes=tuple(map(NodeId, nodes)),
        deadlines=Deadlines(form_seconds=form_seconds),
    )


class NetCluster(LocalCluster):
    """The coordinator runs on host "h0", and worker "h1" on host "h1", and so on, for every further host of the bed.

    `links` are the bridges whose addresses the workers offer; `None` leaves that to the workers. The coordinator
    listens on its address on bridge 0, or on `listen`; either way the workers join there. No runner is kept warm unless
    `node_options` say so: a worker without ranks has no child but its reaper, and what else is on a host is left over.
    `coordinator_options` come last, so they may say otherwise than the arguments before. `places` are the hosts of
    other members, by name: {"standby": "h3"}; `nodes` must leave them out.
    """

    def __init__(
        self,
        bed: Bed,
        directory: Path,
        *,
        links: Sequence[int] | None = None,
        listen: str | None = None,
        nodes: Sequence[str] | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        coordinator_options: Sequence[str] = (),
        node_options: Sequence[str] = ("--pool", "0"),
        log_level: str = "debug",
        places: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            directory,
            bed.hosts[1:] if nodes is None else nodes,
            coordinator_options=(
                *("--host", listen or bed.address(bed.hosts[0])),
                *("--heartbeat", str(heartbeat_seconds), "--lease", str(lease_seconds)),
                *coordinator_options,
            ),
            node_options=node_options,
            log_level=log_level,
        )
        self.bed = bed
        self._links = links
        self._places = {"coordinator": bed.hosts[0], **(places or {})}

    def start_coordinator(self, options: Sequence[str] = ()) -> Member:
        """Start the coordinator on the first host."""
        member = super().start_coordinator(options)
        port = parse_endpoint(self.address).port
        self.address = f"{self.bed.address(self.bed.hosts[0])}:{port}"
        return member

    def start_standby(self, port: int = 0, options: Sequence[str] = ()) -> Member:
        """Start the standby on the host that `places` names."""
        return super().start_standby(port, ("--host", self.bed.address(self.host_of("standby")), *options))

    def start_worker(self, node: str, *, wait: bool = True, options: Sequence[str] = ()) -> Member:
        """Start the worker of a host, with the addresses of this cluster's links."""
        addresses = [part for link in self._links or () for part in ("--address", self.bed.address(node, link))]
        return super().start_worker(node, wait=wait, options=(*addresses, *options))

    def host_of(self, name: str) -> str:
        """The host that a member ("coordinator", or a node) is on."""
        return self._places.get(name, name)

    def stop_process(self, name: str) -> None:
        """Let the coordinator or a worker stand still (SIGSTOP); its runners go on."""
        self.bed.stop(self.host_of(name), self.members[name].process.pid)

    def proceed(self, name: str) -> None:
        """Let it go on."""
        self.bed.proceed(self.host_of(name), self.members[name].process.pid)

    def restart(self, name: str, by: signal.Signals = signal.SIGKILL) -> Member:
        """End a coordinator or a worker by a signal, and start it again: same ports, same directory.

        Raises:
            UnreachableError: it did not come up; the message quotes the end of its log.
        """
        process = self.members[name].process
        process.send_signal(by)
        process.wait(PATIENCE_SECONDS)
        match name:
            case "coordinator":
                return self.start_coordinator()
            case "standby":
                return self.start_standby()
            case _:
                return self.start_worker(name)

    def client(self, host: str = "h0", address: str | None = None) -> NetClient:
        """A client on a host; it asks the coordinator at `address`, by default where the workers find it."""
        return NetClient(self.bed, host, address or self.address)

    def _start(self, name: str, arguments: list[str]) -> Member:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        log = self.directory / f"{name}.log"
        options = ["--ready-file", str(ready), "--log-level", self._log_level]
        with log.open("ab") as output:
            command = [sys.executable, "-m", "muster", *arguments, *options]
            process = self.bed.run(self.host_of(name), *command, stdout=output, stderr=subprocess.STDOUT)
        self.members[name] = Member(name, process, log, ready)
        return self.members[name]

    # --- what is left ---------------------------------------------------------------------------------------

    def leftovers(self, rank: Rank) -> list[str]:
        """What a rank left on its host: its process, its sockets, its file; empty when it is gone for certain."""
        found: list[str] = []
        if rank.pid and rank.pid in self.bed.pids(rank.node) and _started(rank.pid) == rank.process_started:
            found.append(f"process {rank.pid}")
        own = {f"{address.host}:{address.port}" for address in rank.addresses}
        found += [
            f"socket {one.local} {one.state}" for one in self.bed.sockets(rank.node) if one.pids and one.local in own
        ]
        found += [path.name for path in (self.directory / rank.node / "groups").glob("*")]
        return found

    def wait_nothing_left(self, ranks: Sequence[Rank]) -> None:
        """Wait until the ranks are gone for certain.

        Raises:
            AssertionError: they are not in time; the message says what is there.
        """

        def left() -> dict[str, list[str]]:
            return {f"rank {rank.rank} on {rank.node}": found for rank in ranks if (found := self.leftovers(rank))}

        wait_until(lambda: not left(), lambda: f"left behind: {left()}")


class NetClient:
    """A client of the coordinator that lives on a host of the bed. Blocks; a context manager."""

    def __init__(self, bed: Bed, host: str, address: str) -> None:
        pipe = subprocess.PIPE
        self._process = bed.run(host, sys.executable, control_relay.__file__, address, stdin=pipe, stdout=pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def call(self, request: AnyRequest) -> list[AnyReply]:
        """Ask the coordinator, and wait for all replies; `Refused` where it is not reached."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        control_relay.write_frame(self._process.stdin, msgspec.msgpack.encode(request))
        frame = control_relay.read_frame(self._process.stdout)
        assert frame is not None, "the client on the host ended"
        return _replies_decoder.decode(frame)

    def create(self, spec: InstanceSpec) -> InstanceId:
        """Create an instance, which must be accepted."""
        (reply,) = self.call(Create(spec=spec))
        assert isinstance(reply, Created), reply
        return reply.instance

    def delete(self, instance: InstanceId) -> None:
        """Delete an instance and wait until it is gone."""
        self.call(Delete(instance=instance))
        self.wait_for(lambda state: instance not in state.instances, f"{instance} is deleted")

    def state(self) -> State:
        """The coordinator's state now."""
        (reply,) = self.call(Get())
        assert isinstance(reply, Snapshot), reply
        return _state_decoder.decode(reply.state)

    def events(self, instance: InstanceId | None = None, after: int = 0) -> list[tuple[Envelope, Event | Unknown]]:
        """The log after a sequence."""
        (reply,) = self.call(Query(instance=instance, after=after))
        assert isinstance(reply, Found), reply
        return [(envelope, envelope.event()) for envelope in map(decode_envelope, reply.envelopes)]

    def ask(self, instance: InstanceId, messages: Sequence[Message]) -> str:
        """What a model answers."""
        replies = self.call(Generate(instance=instance, messages=tuple(messages)))
        assert isinstance(replies[-1], Done), replies
        return "".join(reply.text for reply in replies if isinstance(reply, Chunk))

    # --- waiting --------------------------------------------------------------------------------------------

    def wait_for(self, holds: Callable[[State], bool], what: str, seconds: float = PATIENCE_SECONDS) -> State:
        """Wait until the coordinator's state is as wanted.

        Raises:
            AssertionError: it is not in time.
        """
        found: list[State] = []

        def settled() -> bool:
            found[:] = [self.state()]
            return holds(found[0])

        wait_until(settled, lambda: f"not in time: {what}; {found[0]}", seconds)
        return found[0]

    def wait_ready(self, instance: InstanceId) -> Instance:
        """Wait until an instance is ready. Raises `AssertionError` where it fails, with the cause."""
        state = self.wait_for(lambda state: not _starting(state.instances[instance]), f"{instance} is up")
        ready = state.instances[instance]
        assert isinstance(ready.status, Running), ready.status
        return ready

    def wait_failed(self, instance: InstanceId, seconds: float = PATIENCE_SECONDS) -> tuple[Instance, Broken]:
        """Wait until an instance has failed, and every rank of it is counted as gone."""
        state = self.wait_for(
            lambda state: isinstance(state.instances[instance].status, Broken), f"{instance} fails", seconds
        )
        state = self.wait_for(lambda state: all_gone(state.instances[instance]), f"{instance} is torn down")
        failed = state.instances[instance]
        assert isinstance(failed.status, Broken)
        return failed, failed.status

    def wait_linked(self, *nodes: str) -> None:
        """Wait until these nodes know of a link between each two: what was cut is tried again every few seconds."""

        def missing() -> list[str]:
            (reply,) = self.call(Get())
            assert isinstance(reply, Snapshot), reply
            state = _state_decoder.decode(reply.state)
            infos = {name: node.info for name, node in state.nodes.items() if node.lost is None}
            links = LinkMap(infos, {one.node: one for one in reply.links})
            pairs = itertools.combinations(map(NodeId, nodes), 2)
            return [why for one, other in pairs if (why := links.why_not(one, other))]

        wait_until(lambda: not missing(), lambda: f"no links: {missing()}")

    def wait_node(self, node: str, *, lost: bool, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a node is lost, or is there."""

        def holds(state: State) -> bool:
            known = state.nodes.get(NodeId(node))
            return known is not None and (known.lost is not None) == lost

        self.wait_for(holds, f"{node} is {'lost' if lost else 'there'}", seconds)


def _starting(instance: Instance) -> bool:
    return not isinstance(instance.status, Running | Broken)


def _started(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def wait_until(holds: Callable[[], bool], why: Callable[[], str], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a condition. Raises `AssertionError` with `why()` where it does not come to hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(_POLL_SECONDS)
