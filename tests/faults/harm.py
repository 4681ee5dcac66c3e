"""Doing it: the faults of processes, disks and links, and putting right what they broke."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Final

import psutil
from cells import LEASE_SECONDS, Cell, Fault, Target
from grounds import Ground
from kit import Client
from leftovers import children

from muster.protocol import Create, Delete
from muster.replies import Created, Refused
from muster.spec import InstanceId, InstanceSpec, NodeId, ScriptWorkload
from muster.state import Instance

_COORDINATOR: Final = "coordinator"
#: An event that fills the rest of a log's last pages soon.
_EVENT_BYTES: Final = 500_000
#: More of them than fit into the pages that a log has reserved.
_MOST_EVENTS: Final = 50


class Harm:
    """What is done to a cluster. `node` is that of the rank which the target of the cell is, or belongs to."""

    def __init__(self, ground: Ground, client: Client) -> None:
        self._ground = ground
        self._client = client

    def inject(self, cell: Cell, instance: Instance, node: str) -> None:
        """Do it to the target, and return at once."""
        member = _member(cell, node)
        number = signal.SIGKILL if cell.fault is Fault.KILL else signal.SIGSTOP
        match cell.fault:
            case Fault.KILL | Fault.STOP if cell.target.is_rank:
                self._process(instance, cell).send_signal(number)
            case Fault.KILL:
                self._ground.cluster.kill(member)
            case Fault.STOP:
                self._signal(member, number)
            case Fault.FULL:
                self._ground.fill(member)
            case Fault.CUT | Fault.DEAF | Fault.MUTE:
                self._ground.cut(member, cell.fault)

    def outlast(self, cell: Cell) -> bool:
        """End a fault that is over by itself; `False` where it goes on until `mend`.

        While the coordinator can say nothing, there is no event to wait for.
        """
        if cell.target is not Target.COORDINATOR or cell.fault is Fault.CUT:
            return False
        match cell.fault:
            case Fault.STOP:
                time.sleep(1.5 * LEASE_SECONDS)  # the fault is this long
                self._signal(_COORDINATOR, signal.SIGCONT)
            case Fault.FULL:
                accepted = self._write_until_refused()
                self._ground.free(_COORDINATOR)
                for instance in accepted:
                    self._client.call(Delete(instance=instance, now=True))
            case _:
                pass
        return True

    def mend(self, cell: Cell, node: str) -> None:
        """Put right what the cell broke."""
        member = _member(cell, node)
        match cell.fault:
            case Fault.KILL if cell.target is Target.WORKER:
                self._ground.cluster.start_worker(member)
            case Fault.KILL if cell.target is Target.COORDINATOR:
                before = self._client.latest.coordinator_boot
                self._ground.cluster.start_coordinator()
                self._client.wait_for(lambda: self._client.latest.coordinator_boot != before, "the new coordinator")
            case Fault.STOP if not cell.target.is_rank:
                self._signal(member, signal.SIGCONT)
            case Fault.FULL:
                self._ground.free(member)
            case Fault.CUT | Fault.DEAF | Fault.MUTE:
                self._ground.heal(member)
            case _:
                pass

    def mend_all(self) -> None:
        """After a cell that went wrong: whatever it broke."""
        for member in (_COORDINATOR, *self._ground.nodes):
            self._signal(member, signal.SIGCONT)
            self._ground.heal(member)
        for member in (_COORDINATOR, self._ground.nodes[1]):
            with contextlib.suppress(KeyError):  # it has no disk of its own here
                self._ground.free(member)
        members = self._ground.cluster.members
        if members[_COORDINATOR].process.poll() is not None:
            self._ground.cluster.start_coordinator()
        for node in self._ground.nodes:
            if members[node].process.poll() is not None:
                self._ground.cluster.start_worker(node)

    def _signal(self, member: str, number: int) -> None:
        """Signal a worker or the coordinator, if it is there."""
        process = self._ground.cluster.members[member].process
        if process.poll() is None:
            os.kill(process.pid, number)

    def _process(self, instance: Instance, cell: Cell) -> psutil.Process:
        """The runner of a rank. One that is not prepared yet is known to its worker alone."""
        rank = instance.ranks[cell.target.rank]
        if rank.pid:
            return psutil.Process(rank.pid)
        (runner,) = children(self._ground, rank.node)
        return runner

    def _write_until_refused(self) -> list[InstanceId]:
        """Have the coordinator log large events until it cannot; the instances that it accepted before."""
        accepted: list[InstanceId] = []
        nowhere = ScriptWorkload(path="/nowhere.py")
        spec = InstanceSpec(workload=nowhere, nodes=(NodeId(self._ground.nodes[-1]),))
        while len(accepted) < _MOST_EVENTS:
            reply = self._client.call(Create(spec=spec, key=f"{len(accepted)} {time.time_ns()} {'x' * _EVENT_BYTES}"))
            if isinstance(reply, Refused):
                assert reply.failure.kind == "log-unavailable", reply.failure
                return accepted
            assert isinstance(reply, Created), reply
            accepted.append(reply.instance)
        raise AssertionError(f"the disk is full, and yet {_MOST_EVENTS} instances were accepted")


def _member(cell: Cell, node: str) -> str:
    """Whose process, disk or link a cell is about."""
    return _COORDINATOR if cell.target is Target.COORDINATOR else node
