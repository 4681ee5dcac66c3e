"""Who may call itself a node of this cluster."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection

import msgspec

from muster.coordinator.plausible import are_ipv4
from muster.lifecycle import SECOND, Settings
from muster.protocol import Hello
from muster.spec import COORDINATOR, Failure, NodeAddress, NodeInfo
from muster.state import Node, State

#: More than that are no interfaces of a machine.
_MAXIMUM_ADDRESSES = 512
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a hello: `joins` logs it as a new boot, `lost` is the reason why the boot before it is over.

    `proof` has to be repeated first.
    """

    joins: bool
    lost: str | None = None
    proof: str = ""


class Registrar:
    """Decides about each hello. A second worker under a live node's id is kept out, a restarted one is let in."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._first_refused_ns: dict[str, int] = {}
        self._proofs: dict[str, str] = {}

    def admit(self, hello: Hello, state: State, heard_ns: int | None, now_ns: int) -> Admission | Failure:
        """Judge a worker's hello. `heard_ns` is when the node's present boot was last heard."""
        info = hello.info
        assert info is not None
        bad = _malformed(info)
        if bad is not None:
            return bad
        node = state.nodes.get(info.node)
        if node is None:
            return Admission(joins=True)
        if node.info.boot == info.boot:
            proof = self._doubt(hello, node)
            return Admission(joins=not proof and (node.lost is not None or node.info != info), proof=proof)
        if node.lost is not None:
            return Admission(joins=True)
        if info.replaces == node.info.boot:
            return Admission(joins=True, lost="its worker was started again")
        return self._taken(info, node.info, heard_ns, now_ns)

    def _doubt(self, hello: Hello, node: Node) -> str:
        """What a lost boot has to repeat: one that is heard and hears nothing would be lost again and again."""
        if node.lost is None:
            return ""
        proof = self._proofs.pop(node.info.node, "")
        if proof and proof == hello.proof:
            return ""
        proof = self._proofs[node.info.node] = secrets.token_hex(4)
        return proof

    def _taken(self, info: NodeInfo, holder: NodeInfo, heard_ns: int | None, now_ns: int) -> Failure:
        """The other may be dead and its lease not yet over: the newcomer tries again until that is known."""
        lease_ns = int(self._settings.lease_seconds * SECOND)
        recent = {boot: since for boot, since in self._first_refused_ns.items() if now_ns - since < 10 * lease_ns}
        first = recent.setdefault(info.boot, now_ns)
        self._first_refused_ns = recent
        alive = heard_ns is not None and now_ns - heard_ns < lease_ns
        final = now_ns - first > lease_ns + SECOND and alive
        if final:
            del self._first_refused_ns[info.boot]
        return Failure(
            kind="node-id-taken",
            message=f"node {info.node} is already run by process {holder.pid} on {holder.hostname}",
            remedy="Give this worker another --node-id, or stop the other one.",
            node=info.node,
            retryable=not final,
        )


def bad_addresses(addresses: Collection[NodeAddress]) -> bool:
    """Whether some of them are not IPv4, or they are more than a machine has."""
    return len(addresses) > _MAXIMUM_ADDRESSES or not are_ipv4(address.host for address in addresses)


def _malformed(info: NodeInfo) -> Failure | None:
    problem = ""
    if not _NODE_ID.fullmatch(info.node):
        problem = f"the node id {info.node!r} is not 1 to 63 letters, digits, dots, dashes or underscores"
    elif info.node == COORDINATOR:
        problem = f"the node id {info.node!r} is the coordinator's own"
    elif not 0 < len(info.boot) <= 64 or max(len(info.hostname), len(info.machine)) > 256:
        problem = "boot is empty, or boot, hostname or machine is too long"
    elif bad_addresses((*info.addresses, *info.candidates)):
        problem = f"node {info.node} has an address that is not IPv4, or too many"
    elif not info.addresses:
        problem = f"node {info.node} has no address"
    elif not 0 <= info.peer_port < 2**16:
        problem = f"node {info.node} says peer_port {info.peer_port}; a port is 1 to 65535, and 0 is none"
    elif info.max_ranks < 1 or not 0 <= info.memory_bytes < 2**60:
        problem = f"node {info.node} says max_ranks {info.max_ranks} and memory_bytes {info.memory_bytes}"
    if not problem:
        return None
    return Failure(kind="request-invalid", message=problem, remedy="Correct it and join again.")
