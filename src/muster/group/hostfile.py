"""`mlx.launch`'s hostfile: read with its own meaning, but every mistake is named; and written so that it can read it.

Two forms: a list of hosts, or an object with "backend", "envs" and "hosts". A host is an object: "ssh", the name that
it is reached by; "ips", where its rank listens, one connection each; "rdma", its row of the device matrix. We add an
optional "node", the id of a muster node, which `mlx.launch` passes over.

Source: `mlx/_distributed_utils/common.py` (`Hostfile`) and `launch.py` (`launch_ring`, `launch_jaccl`) of mlx 0.32.4.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Final, Literal, NoReturn, TypeAlias, cast

import msgspec

from muster.errors import RequestError
from muster.group.scope import CONFLICTING_NAMES, CONFLICTING_PREFIXES
from muster.layout import Devices

FileBackend: TypeAlias = Literal["", "ring", "jaccl", "jaccl-ring"]
Row: TypeAlias = tuple[str | tuple[str, ...] | None, ...]

_BACKENDS: Final = ("ring", "jaccl", "jaccl-ring")
_FOREIGN_BACKENDS: Final = ("mpi", "nccl")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEVICE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_MOST_HOSTS: Final = 1024


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a hostfile. `node` is a node's id, where the file names one."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: Row = ()
    node: str = ""


class Hostfile(msgspec.Struct, frozen=True, kw_only=True):
    """A hostfile, in rank order. `backend` is empty where the file leaves the choice open."""

    hosts: tuple[Host, ...]
    backend: FileBackend = ""
    environment: dict[str, str] = {}

    @property
    def devices(self) -> Devices:
        """The matrix of RDMA devices; empty where the file has none."""
        return tuple(host.rdma for host in self.hosts) if self.hosts and self.hosts[0].rdma else ()


def parse(text: str) -> Hostfile:
    """Read a hostfile.

    Raises:
        RequestError: it is no JSON, has an unknown key or a value that does not fit. `field` says where, as
            "hosts[1].rdma", the message has the value, and the remedy what would be right.
    """
    try:
        document: object = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()  # halves of surrogate pairs cannot be sent to anybody
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the hostfile is no JSON: {error}", remedy='Write {"hosts": [{"ssh": "mac1", "ips": ["10.0.0.1"]}, …]}.'
        ) from error
    if isinstance(document, list):
        return _checked(cast("list[object]", document), "", {})
    if not isinstance(document, dict):
        _refuse("", f"the hostfile is {_shown(document)}", "Write a list of hosts, or an object with hosts.")
    found = cast("dict[str, object]", document)
    _check_keys("", found, ("backend", "envs", "hosts"))
    if not isinstance(hosts := found.get("hosts"), list):
        what = _shown(hosts) if "hosts" in found else "missing"
        _refuse("hosts", f"hosts is {what}", "Write a list with one object per rank.")
    backend = _backend(found.get("backend", ""))
    return _checked(cast("list[object]", hosts), backend, _environment(found.get("envs", [])))


def write(hostfile: Hostfile) -> str:
    """The hostfile as JSON text, the object form, with a host per line; `parse` gives it back."""
    hosts = ",\n".join("    " + json.dumps(_document(host)) for host in hostfile.hosts)
    envs = json.dumps([f"{name}={value}" for name, value in hostfile.environment.items()])
    return f'{{\n  "backend": {json.dumps(hostfile.backend)},\n  "envs": {envs},\n  "hosts": [\n{hosts}\n  ]\n}}\n'


def _document(host: Host) -> dict[str, object]:
    found: dict[str, object] = {"ssh": host.ssh, "ips": list(host.ips)}
    found["rdma"] = [list(entry) if isinstance(entry, tuple) else entry for entry in host.rdma]
    return {**found, "node": host.node} if host.node else found


# --- what the parts may be ------------------------------------------------------------------------------------


def _checked(entries: list[object], backend: FileBackend, environment: dict[str, str]) -> Hostfile:
    if not 1 <= len(entries) <= _MOST_HOSTS:
        _refuse("hosts", f"hosts has {len(entries)} entries", f"Write one object per rank, 1 to {_MOST_HOSTS}.")
    hosts = tuple(_host(index, entry) for index, entry in enumerate(entries))
    hostfile = Hostfile(hosts=hosts, backend=backend, environment=environment)
    if backend.startswith("jaccl") or any(host.rdma for host in hosts):
        _check_devices(hostfile)
    _check_ips(hostfile)
    return hostfile


def _host(index: int, entry: object) -> Host:
    where = f"hosts[{index}]"
    if isinstance(entry, list):
        remedy = 'Write an object with "ssh" and "ips"; lists of "ip:port" are for MLX itself, muster writes those.'
        _refuse(where, f"{where} is a list", remedy)
    if not isinstance(entry, dict):
        _refuse(where, f"{where} is {_shown(entry)}", 'Write an object: {"ssh": "mac1", "ips": ["10.0.0.1"]}.')
    found = cast("dict[str, object]", entry)
    _check_keys(where, found, ("ssh", "ips", "rdma", "node"))
    texts: dict[str, str] = {}
    for key in ("ssh", "node"):
        value = found.get(key)
        if key == "ssh" and "ssh" not in found:
            _refuse(f"{where}.ssh", f"{where} has no ssh", "Write the host's name, its address or its node's id.")
        if value is not None and not (isinstance(value, str) and value.strip() and value.isprintable()):
            _refuse(f"{where}.{key}", f"{where}.{key} is {_shown(value)}", "Write a name as text.")
        texts[key] = value or ""
    if not texts["ssh"]:
        _refuse(f"{where}.ssh", f"{where}.ssh is null", "Write the host's name, its address or its node's id.")
    return Host(ssh=texts["ssh"], node=texts["node"], ips=_ips(where, found), rdma=_row(where, found))


def _ips(where: str, found: dict[str, object]) -> tuple[str, ...]:
    ips = found.get("ips", [])
    if not isinstance(ips, list):
        _refuse(f"{where}.ips", f"{where}.ips is {_shown(ips)}", 'Write a list, as ["10.0.0.1"].')
    for index, ip in enumerate(cast("list[object]", ips)):
        if not (isinstance(ip, str) and _is_ipv4(ip)):
            what = f"{where}.ips[{index}] is {_shown(ip)}, which is no IPv4 address"
            _refuse(f"{where}.ips[{index}]", what, "MLX's ring takes IPv4 only: write it as 10.0.0.1, without a port.")
    if len(set(cast("list[str]", ips))) != len(cast("list[str]", ips)):
        _refuse(f"{where}.ips", f"{where}.ips names an address twice: {_shown(ips)}", "Write each address once.")
    return tuple(cast("list[str]", ips))


def _row(where: str, found: dict[str, object]) -> Row:
    row = found.get("rdma", [])
    if not isinstance(row, list):
        _refuse(f"{where}.rdma", f"{where}.rdma is {_shown(row)}", 'Write a list, as [null, "rdma_en2"].')
    entries: list[str | tuple[str, ...] | None] = []
    for index, entry in enumerate(cast("list[object]", row)):
        several = cast("list[object]", entry) if isinstance(entry, list) else None
        names = [entry] if several is None else several
        if entry is not None and not (
            names and all(isinstance(name, str) and _DEVICE.fullmatch(name) for name in names)
        ):
            what = f"{where}.rdma[{index}] is {_shown(entry)}"
            _refuse(f"{where}.rdma[{index}]", what, "Write a device as ibv_devices names it, a list of such, or null.")
        if several is not None:
            entries.append(tuple(cast("list[str]", several)))
        else:
            entries.append(cast("str | None", entry))
    return tuple(entries)


def _backend(value: object) -> FileBackend:
    if value in _FOREIGN_BACKENDS:
        _refuse("backend", f"backend is {value!r}", f"Use mlx.launch; muster forms {', '.join(_BACKENDS)}.")
    if value != "" and value not in _BACKENDS:
        _refuse("backend", f"backend is {_shown(value)}", f"Use one of: {', '.join(_BACKENDS)}.")
    return cast("FileBackend", value)


def _environment(value: object) -> dict[str, str]:
    if not isinstance(value, list):
        _refuse("envs", f"envs is {_shown(value)}", 'Write a list, as ["MLX_METAL_FAST_SYNCH=1"].')
    found: dict[str, str] = {}
    for index, entry in enumerate(cast("list[object]", value)):
        where = f"envs[{index}]"
        name, _, text = entry.partition("=") if isinstance(entry, str) else ("", "", "")
        if not _VARIABLE.fullmatch(name) or "\0" in text:
            _refuse(where, f"{where} is {_shown(entry)}", "Write KEY=VALUE; a key has letters, digits and '_' only.")
        if name in CONFLICTING_NAMES or name.startswith(CONFLICTING_PREFIXES):
            _refuse(where, f"{where} sets {name}, which muster itself sets for each rank", "Leave it out.")
        if name in found:
            _refuse(where, f"{where} sets {name} a second time", "Set each variable once.")
        found[name] = text
    return found


def _check_keys(where: str, found: dict[str, object], known: tuple[str, ...]) -> None:
    for key in found:
        if key not in known:
            owner = where or "the hostfile"
            field = f"{where}.{key}" if where else key
            _refuse(field, f"{owner} has the unknown key {key!r}", f"The keys are: {', '.join(known)}.")


def _check_devices(hostfile: Hostfile) -> None:
    hosts, size = hostfile.hosts, len(hostfile.hosts)
    for index, host in enumerate(hosts):
        where = f"hosts[{index}].rdma"
        if len(host.rdma) != size:
            what = f"{where} has {len(host.rdma)} entries for {size} hosts"
            _refuse(where, what, "Write one entry per host in each row, null for the host itself.")
        if host.rdma[index] is not None:
            what = f"{where}[{index}] is {_shown(host.rdma[index])}, a device from {host.ssh} to itself"
            _refuse(f"{where}[{index}]", what, "Write null there.")
        for other in _partners(hostfile, index):
            if host.rdma[other] is None:
                what = f"{where}[{other}] is null: there is no device from {host.ssh} to {hosts[other].ssh}"
                more = ' or write "backend": "jaccl-ring"' if hostfile.backend == "jaccl" else ""
                _refuse(f"{where}[{other}]", what, f"Connect the two and write the device{more}.")


def _partners(hostfile: Hostfile, index: int) -> list[int]:
    """Which ranks this one must have a device to."""
    size = len(hostfile.hosts)
    if hostfile.backend == "jaccl":
        return [other for other in range(size) if other != index]
    neighbours = {(index - 1) % size, (index + 1) % size} - {index}
    return sorted(neighbours) if hostfile.backend == "jaccl-ring" else []


def _check_ips(hostfile: Hostfile) -> None:
    hosts, jaccl = hostfile.hosts, hostfile.backend.startswith("jaccl")
    open_choice = not hostfile.backend and bool(hostfile.devices)
    for index, host in enumerate(hosts):
        where = f"hosts[{index}].ips"
        if not host.ips and not (jaccl and index):
            why = "the other ranks reach rank 0 there" if jaccl else "its rank listens there"
            _refuse(where, f"{where} is empty: host {host.ssh} has no address, and {why}", "Write its IPv4 address.")
        if not jaccl and not open_choice and len(host.ips) != len(hosts[0].ips):
            what = f"{where} has {len(host.ips)} addresses, hosts[0].ips has {len(hosts[0].ips)}"
            _refuse(where, what, "Write equally many for each host: MLX makes one connection for each.")


def _is_ipv4(text: str) -> bool:
    try:
        return str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _refuse(field: str, message: str, remedy: str) -> NoReturn:
    raise RequestError(message, remedy=remedy, field=field)
