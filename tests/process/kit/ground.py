"""A cluster for random lives: what is broken in it at the moment, and what must hold all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from kit.auditor import Auditor
from kit.client import Client
from kit.processes import alive
from kit.relayed import RelayedCluster
from kit.remains import Patience, check_files, check_gone, left_of, runners_of, wrong_of
from kit.waiting import until
from muster.errors import MusterError
from muster.events import decode_envelope
from muster.protocol import AnyRequest, Get, Query
from muster.replies import AnyReply, Found, Snapshot
from muster.spec import NodeId
from muster.state import State

NODES = ("a", "b", "c")
COORDINATOR = "coordinator"
HEARTBEAT_SECONDS = 0.2
LEASE_SECONDS = 1.5
#: How long the coordinator may take to answer on a busy machine.
ANSWER_SECONDS = 15.0
#: How long a member may take to end when it is told to, and its runners when it is killed: also that takes CPU.
END_SECONDS = 15.0
ORPHAN_SECONDS = 5.0
#: How long it may take until nothing is left of what is deleted.
LEFT_SECONDS = 10.0


class Ground:
    """Lives on from one example to the next, until one has failed.

    `pool` is how many warm runners each node keeps; `scripts` are texts by name, and `paths` where they are.
    """

    def __init__(self, directory: Path, pool: Mapping[str, int], scripts: Mapping[str, str]) -> None:
        self.directory = directory
        self.made = False
        self.failure: BaseException | None = None  #: what cost a cluster
        self.pool = pool
        self.paths: dict[str, Path] = {}
        self._parent = directory
        self._scripts = scripts
        self._stack = contextlib.ExitStack()
        self._count = 0

    def prepare(self) -> None:
        """Have a cluster without faults, its client, and an auditor who has read all of its log."""
        self.down: set[str] = set()  #: members without a process
        self.cut: set[str] = set()  #: nodes without a link
        self.still: dict[str, psutil.Process] = {}  #: what stands still, by node, or "node/pid" for a runner
        self.patience = {node: Patience() for node in NODES}
        if self.made:
            return
        self._count += 1
        self.directory = self._parent / f"cluster-{self._count}"
        self.cluster = RelayedCluster(
            self.directory,
            NODES,
            options={node: ("--pool", str(size)) for node, size in self.pool.items()},
            coordinator_options=("--heartbeat", str(HEARTBEAT_SECONDS), "--lease", str(LEASE_SECONDS)),
            log_level="debug",
        )
        self._stack.enter_context(self.cluster)
        self.client = self._stack.enter_context(Client(self.cluster.address))
        self.auditor = Auditor()
        self.said = ""  #: what the model answers to its question, each time
        self._compared = 0
        for name, text in self._scripts.items():
            self.paths[name] = self.directory / f"{name}.py"
            self.paths[name].write_text(text)
        self.made = True

    def discard(self) -> None:
        """End the cluster; whatever state it is in, nothing of it stays."""
        if self.made:
            self.made = False
            for process in self.still.values():  # what stands still does not hear SIGTERM
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        self._stack.close()

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def served(self) -> bool:
        """Whether there is a coordinator."""
        return COORDINATOR not in self.down

    @property
    def up(self) -> list[str]:
        """The nodes whose worker has a process."""
        return [node for node in NODES if node not in self.down]

    @property
    def missing(self) -> list[str]:
        """The nodes whose worker has none."""
        return [node for node in NODES if node in self.down]

    @property
    def unheard(self) -> list[str]:
        """The nodes that the coordinator cannot hear."""
        return sorted({*self.missing, *self.cut, *self.still_nodes})

    @property
    def still_nodes(self) -> set[str]:
        """The nodes whose worker stands still."""
        return {node for node in NODES if node in self.still}

    def process(self, name: str) -> psutil.Process:
        """The process of a member that is up."""
        return psutil.Process(self.cluster.members[name].process.pid)

    def runners(self) -> list[tuple[str, psutil.Process]]:
        """All runners by name ("node/pid"), also warm ones."""
        return [(f"{node}/{one.pid}", one) for node in self.up for one in runners_of(self.process(node))]

    def lost(self, node: str) -> bool:
        """Whether the node is lost, as far as the client has heard."""
        return self.client.latest.nodes[NodeId(node)].lost is not None

    def doubted(self, node: str) -> bool:
        """Whether the node is suspect or lost, as far as the client has heard."""
        return self.lost(node) or self.client.latest.nodes[NodeId(node)].suspect is not None

    # --- what breaks, and is mended -----------------------------------------------------------------------------

    def kill_runner(self, name: str, runner: psutil.Process) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner.pid, signal.SIGKILL)
        self.still.pop(name, None)

    def kill_worker(self, node: str) -> None:
        """SIGKILL; its runners do not outlive it."""
        runners = [(one.pid, one.create_time()) for one in runners_of(self.process(node))]
        self.cluster.kill(node)
        self._note_end(node)
        until(lambda: not any(alive(*one) for one in runners), f"the end of the runners {runners}", ORPHAN_SECONDS)

    def end_worker(self, node: str) -> None:
        """SIGTERM; it ends well, and after its runners; but for one that has just been started and cannot yet."""
        runners = [(one.pid, one.create_time()) for one in runners_of(self.process(node))]
        member = self.cluster.members[node]
        ends = {0} if member.ready.exists() else {0, -signal.SIGTERM}
        member.process.send_signal(signal.SIGTERM)
        assert member.process.wait(END_SECONDS) in ends, f"worker {node} ended with {member.process.returncode}"
        self._note_end(node)
        assert not [one for one in runners if alive(*one)], f"runners {runners} outlive their worker"

    def _note_end(self, node: str) -> None:
        self.down.add(node)
        for name in [name for name in self.still if name == node or name.startswith(f"{node}/")]:
            del self.still[name]

    def start_worker(self, node: str) -> None:
        """Start it again, and wait for its welcome if it can have one."""
        self.cluster.start_worker(node, wait=self.served and node not in self.cut)
        self.down.discard(node)

    def stop(self, name: str, process: psutil.Process) -> None:
        """SIGSTOP."""
        self.still[name] = process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()

    def let_go_on(self, name: str) -> None:
        """SIGCONT."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.still.pop(name).resume()

    def cut_off(self, node: str) -> None:
        """No byte passes between the node and the coordinator."""
        self.cluster.cut(node)
        self.cut.add(node)

    def heal(self, node: str) -> None:
        """They pass again."""
        self.cluster.heal(node)
        self.cut.discard(node)

    def end_coordinator(self, politely: bool) -> None:
        """SIGTERM or SIGKILL."""
        process = self.cluster.members[COORDINATOR].process
        if politely:
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_SECONDS) == 0, f"the coordinator ended with {process.returncode}"
        self.cluster.kill(COORDINATOR)
        self.down.add(COORDINATOR)

    def start_coordinator(self) -> None:
        """Start it again, on its log and its ports."""
        self.cluster.start_coordinator()
        self.down.discard(COORDINATOR)

    def mend(self) -> None:
        """Let nothing be broken any more."""
        for name in list(self.still):
            self.let_go_on(name)
        for node in sorted(self.cut):
            self.heal(node)
        if not self.served:
            self.start_coordinator()
        for node in self.missing:
            self.cluster.start_worker(node, wait=False)
            self.down.discard(node)
        for node in NODES:
            self.cluster.wait_ready(node)

    # --- what must hold ---------------------------------------------------------------------------------------

    def call(self, request: AnyRequest) -> AnyReply:
        """One call that must be answered; it is made again if it was on its way when a connection was lost."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                return self.client.call(request, ANSWER_SECONDS / 3)
            except MusterError as error:
                assert time.monotonic() < deadline, f"no answer to {type(request).__name__}: {error}"

    def audit(self) -> State:
        """Take what is new in the log: it leads to the state that the coordinator has, and holds all that was seen."""
        snapshot = self.call(Get())
        assert isinstance(snapshot, Snapshot), snapshot
        state = msgspec.msgpack.decode(snapshot.state, type=State)
        while (head := self.auditor.state.sequence) < state.sequence:
            found = self.call(Query(after=head, limit=state.sequence - head))
            assert isinstance(found, Found), found
            assert found.envelopes, f"the log ends at {head}, and the state of the coordinator is {state.sequence}"
            self.auditor.take(map(decode_envelope, found.envelopes))
        assert self.auditor.state == state, f"the log leads to\n{self.auditor.state}\nand not to\n{state}"
        new = [one for one in list(self.client.envelopes)[self._compared :] if one.sequence <= head]
        self.auditor.compare(new)
        self._compared += len(new)
        return state

    def check(self) -> None:
        """What must hold at any moment, whatever is broken, beside the log: processes and files."""
        for name, member in self.cluster.members.items():
            ended = name not in self.down and member.process.poll() is not None
            tail = self.cluster.log_of(name)[-3000:]
            assert not ended, f"{name} ended by itself with {member.process.returncode}:\n{tail}"
        check_gone(self.auditor)
        for node in NODES:
            check_files(self.cluster.directory / node)
            self.patience[node].see(self._wrong(node) if self._is_free(node) else set())

    def _is_free(self, node: str) -> bool:
        """Whether nothing hinders the node's worker from putting right what is wrong."""
        still = any(name.startswith(node) for name in self.still)
        return self.served and node not in self.down and node not in self.cut and not still and not self.lost(node)

    def _wrong(self, node: str) -> set[str]:
        return wrong_of(node, self.process(node), self.cluster.directory / node, self.auditor)

    def wait_nothing_wrong(self) -> None:
        """Where nothing is broken nothing is wrong on any node, and soon so; a script may end at any time."""

        def wrong() -> set[str]:
            self.audit()
            return {what for node in NODES for what in self._wrong(node)}

        try:
            until(lambda: not wrong(), "nothing wrong", LEFT_SECONDS)
        except AssertionError as error:
            raise AssertionError("\n".join(["wrong:", *sorted(wrong())])) from error

    def wait_nothing_left(self) -> None:
        """Without instances nothing is left on any node but its warm runners, and soon so."""
        self.audit()
        try:
            until(lambda: not self._left(), "nothing left", LEFT_SECONDS)
        except AssertionError as error:
            raise AssertionError("\n".join(["left:", *self._left()])) from error

    def _left(self) -> list[str]:
        found: list[str] = []
        for node in NODES:
            directory = self.cluster.directory / node
            found += left_of(node, self.process(node), directory, self.auditor, self.pool[node])
        return found
