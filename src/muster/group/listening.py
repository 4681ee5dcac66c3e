"""Who listens and who is connected, seen in the system's socket table.

MLX takes the first connection to a listening rank for its neighbour, so nobody may connect just to look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import psutil

from muster.group import sockdiag
from muster.group.addresses import WILDCARD, is_loopback, resolve_host

#: Connections that an accept has handed out and that the process still has.
_HELD: Final = (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)

_Endpoint = tuple[str, int]


class _Connection(NamedTuple):
    status: str
    local: _Endpoint
    remote: _Endpoint | None


def is_listening(pid: int, addresses: Sequence[_Endpoint]) -> bool:
    """Whether the process `pid` listens on one of `addresses` now.

    One is enough: MLX listens on a rank's addresses one after the other, on the next when the one before has
    its connection (`mlx/distributed/ring/ring.cpp`, `accept_connections`).

    Args:
        pid: A process of the same user.
        addresses: (IPv4 address, port); a listener on every interface counts too.

    Returns:
        False also when the process is gone.

    Raises:
        PermissionError, psutil.AccessDenied: The system does not show that process's sockets to this user.
    """
    wanted = set(addresses)
    listeners = sockdiag.listening_inodes() if wanted else {}
    if listeners is None:
        return any(one.status == psutil.CONN_LISTEN and _covers(one.local, wanted) for one in _connections(pid))
    inodes = {inode for inode, local in listeners.items() if _covers(local, wanted)}
    return bool(inodes) and not inodes.isdisjoint(sockdiag.socket_inodes(pid))


def has_connection(pid: int, addresses: Sequence[_Endpoint]) -> bool:
    """Whether the process holds a connection that somebody made to one of its `addresses`."""
    ports = {port for _, port in addresses}
    return any(one.status in _HELD and one.remote is not None and one.local[1] in ports for one in _connections(pid))


def strangers(
    pid: int,
    addresses: Sequence[_Endpoint],
    expected_hosts: Collection[str],
    expected_pids: Collection[int] | None = None,
) -> list[str]:
    """Who holds a connection to a rank without being its neighbour; for the diagnosis of a failed attempt.

    A connection that MLX has not accepted yet belongs to no process and is not seen.

    Args:
        pid: The rank's process.
        addresses: (IPv4 address, port) on which the rank listens, or listened before it accepted.
        expected_hosts: IPv4 addresses (or names) from which the left neighbour may dial.
        expected_pids: Processes on this machine that may dial. A connection from this machine that belongs to
            none of them is a stranger's even if its host is expected. None if that is not known.

    Returns:
        One text per stranger, "10.0.0.7:50122" or, on this machine and if the system tells,
        "127.0.0.1:50122 (nmap, pid 4711)". Empty when the process is gone.
    """
    ports = {port for _, port in addresses}
    hosts = {resolve_host(host) or host for host in expected_hosts}
    own = _own_hosts()
    found: list[str] = []
    for one in _connections(pid):
        if one.status not in _HELD or one.remote is None or one.local[1] not in ports:
            continue
        remote = one.remote
        local = remote[0] in own or is_loopback(remote[0])
        expected = remote[0] in hosts
        if expected and local and expected_pids is not None:
            expected = _belongs(remote, expected_pids)
        if not expected:
            found.append(_described(remote) if local else f"{remote[0]}:{remote[1]}")
    return found


def _connections(pid: int) -> list[_Connection]:
    """The IPv4 connections and listeners of `pid`; none when it is gone."""
    try:
        found = psutil.Process(pid).net_connections("tcp4")
    except psutil.NoSuchProcess:
        return []
    return [
        _Connection(
            str(one.status),
            (one.laddr.ip, one.laddr.port),
            (one.raddr.ip, one.raddr.port) if one.raddr else None,
        )
        for one in found
        if one.laddr
    ]


def _covers(local: _Endpoint, wanted: set[_Endpoint]) -> bool:
    return local in wanted or (local[0] == WILDCARD and any(port == local[1] for _, port in wanted))


def _own_hosts() -> set[str]:
    return {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}


def _belongs(endpoint: _Endpoint, pids: Iterable[int]) -> bool:
    """Whether one of `pids` owns `endpoint`; also when one is gone, because it may have owned it."""
    for pid in pids:
        if not psutil.pid_exists(pid):
            return True
        if any(one.local == endpoint for one in _connections(pid)):
            return True
    return False


def _described(endpoint: _Endpoint) -> str:
    text = f"{endpoint[0]}:{endpoint[1]}"
    try:
        for one in psutil.net_connections("tcp4"):
            if one.pid is not None and one.laddr and (one.laddr.ip, one.laddr.port) == endpoint:
                return f"{text} ({psutil.Process(one.pid).name()}, pid {one.pid})"
    except psutil.Error:
        pass
    return text
