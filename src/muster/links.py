"""Measured links between nodes, and which one to use. Pure: `muster.worker` measures, placement asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster.facts import InterfaceKind, NodeFacts
from muster.spec import BootId, NodeAddress, NodeId, NodeInfo

#: Links of which one carries this share of what the fastest does count as equally fast: bursts are short and rough.
EQUAL_SHARE: Final = 0.8
#: Round trips as near to the shortest as this count as equal, in microseconds.
EQUAL_RTT_US: Final = 100.0
#: The kinds of interfaces, the better first; the last two are used only where nothing else reaches.
KINDS: Final[tuple[InterfaceKind, ...]] = (
    "loopback",
    "thunderbolt",
    "ethernet",
    "bridge",
    "virtual",
    "other",
    "wifi",
    "vpn",
)
LAST_RESORTS: Final[tuple[InterfaceKind, ...]] = ("wifi", "vpn")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of addresses, as the node at `own` measured it towards the node `other` at `host`.

    `reached`: the other worker answered at `host`, and was the one that was meant. `dialled_back`: asked to, it
    reached `own` from `host`, so that both ends agree on the pair. Rates are in Mbit/s, `rtt_us` in microseconds,
    the best of a few.
    """

    other: NodeId
    other_boot: BootId
    own: str
    host: str
    reached: bool
    dialled_back: bool = False
    rtt_us: float | None = None
    mbps_out: float | None = None
    mbps_in: float | None = None
    error: str = ""


class NodeLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a boot of a node measured; the latest value counts, none is logged.

    `round` is the highest measuring round that was asked for and is answered with this.
    """

    node: NodeId
    boot: BootId
    n: int = 1
    round: int = 0
    measured: tuple[Measured, ...] = ()


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The pair of addresses that two nodes use between each other, seen from `a`.

    `kind` is the slower kind of both ends. `mbps` is the lesser of both directions; it and `rtt_us` are `None` where
    nothing was measured yet.
    """

    a: NodeId
    b: NodeId
    a_host: str
    b_host: str
    kind: InterfaceKind = "other"
    mbps: float | None = None
    rtt_us: float | None = None

    def reversed(self) -> Link:
        """The same link, seen from the other end."""
        return msgspec.structs.replace(self, a=self.b, b=self.a, a_host=self.b_host, b_host=self.a_host)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of addresses that might carry a link, and what became of it.

    `fault` is why it cannot be used, empty where it can. `mbps_out` is from `link.a` to `link.b`.
    """

    link: Link
    measured: bool = False
    fault: str = ""
    mbps_out: float | None = None
    mbps_in: float | None = None


class LinkMap:
    """Which links the nodes have between each other, the best first. A value: what it is given does not change.

    `links` and `facts` count for the boots that `nodes` has. `network`, as CIDR, is the only one that may be used
    between machines, whatever kind it is.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, NodeInfo],
        links: Mapping[NodeId, NodeLinks] | None = None,
        facts: Mapping[NodeId, NodeFacts] | None = None,
        network: str = "",
    ) -> None:
        self._nodes = nodes
        self._links = {} if links is None else links
        self._facts = {} if facts is None else facts
        self._network = network
        self._measured: dict[NodeId, dict[tuple[NodeId, str, str], Measured]] = {}
        self._kinds: dict[NodeId, dict[str, InterfaceKind]] = {}
        self._trials: dict[tuple[NodeId, NodeId], tuple[Trial, ...]] = {}

    def between(self, a: NodeId, b: NodeId) -> Link | None:
        """The link to use, seen from `a`; `None` where there is none. The same from both ends."""
        first, second = min(a, b), max(a, b)
        trials = self._trials_of(first, second)
        if not trials or trials[0].fault:
            return None
        return trials[0].link if a == first else trials[0].link.reversed()

    def pairs(self, a: NodeId, b: NodeId) -> tuple[Link, ...]:
        """Every link that can be used, the best first, seen from `a`."""
        return tuple(trial.link for trial in self.trials(a, b) if not trial.fault)

    def trials(self, a: NodeId, b: NodeId) -> tuple[Trial, ...]:
        """Every pair of addresses that might carry a link, seen from `a`: those that do first, the best first."""
        first, second = min(a, b), max(a, b)
        trials = self._trials_of(first, second)
        return trials if a == first else tuple(_reversed(trial) for trial in trials)

    def why_not(self, a: NodeId, b: NodeId) -> str:
        """Why there is no link between the two; empty where there is one."""
        for name in (a, b):
            if name not in self._nodes:
                return f"there is no node {name}"
        if a == b:
            return f"node {a} is one node and not two"
        if self.between(a, b) is not None:
            return ""
        if faults := [trial.fault for trial in self.trials(a, b)]:
            return "; ".join(faults)
        only = f" within {self._network}" if self._network else ""
        offers = (", ".join(_networks(self._offers(name))) or "nothing" for name in (a, b))
        return f"nodes {a} and {b} have no network in common{only}: one offers {', the other '.join(offers)}"

    # --- the pairs ----------------------------------------------------------------------------------------

    def _trials_of(self, a: NodeId, b: NodeId) -> tuple[Trial, ...]:
        known = self._trials.get((a, b))
        if known is None:
            known = self._trials[a, b] = tuple(_ranked(self._tried(a, b), self._network != ""))
        return known

    def _tried(self, a: NodeId, b: NodeId) -> list[Trial]:
        if a == b or a not in self._nodes or b not in self._nodes:
            return []
        one, other = self._nodes[a], self._nodes[b]
        if one.network_id and one.network_id == other.network_id:
            # Not 127.0.0.1: in a group over several machines that would be another rank's address too.
            hosts = [offered(info)[0].host for info in (one, other)]
            return [Trial(link=Link(a=a, b=b, a_host=hosts[0], b_host=hosts[1], kind="loopback"))]
        tried = [
            trial
            for left in self._offers(a)
            for right in self._offers(b)
            if (trial := self._trial(a, b, left, right)) is not None
        ]
        if any(not trial.fault for trial in tried):
            return tried
        hosts_tried = {(trial.link.a_host, trial.link.b_host) for trial in tried}
        return tried + [
            trial for trial in self._by_routing(a, b) if (trial.link.a_host, trial.link.b_host) not in hosts_tried
        ]

    def _offers(self, name: NodeId) -> tuple[NodeAddress, ...]:
        """The addresses of the node that others may use."""
        found = offered(self._nodes[name])
        return tuple(one for one in found if not self._network or within(one.host, self._network))

    def _trial(self, a: NodeId, b: NodeId, left: NodeAddress, right: NodeAddress) -> Trial | None:
        """What is known of a pair of addresses; `None` where nothing says that it may carry a link."""
        there = self._record(a, b, left.host, right.host)
        back = self._record(b, a, right.host, left.host)
        link = Link(a=a, b=b, a_host=left.host, b_host=right.host, kind=self._kind(a, b, left.host, right.host))
        if there is None and back is None:
            usual = left in self._nodes[a].addresses and right in self._nodes[b].addresses
            return Trial(link=link) if usual and self._common(a, b, left, right) else None
        fault = _fault(a, b, there, back)
        if fault:
            return Trial(link=link, measured=True, fault=fault)
        rates = [(one.mbps_out, one.mbps_in) for one in (there,) if one is not None]
        rates += [(one.mbps_in, one.mbps_out) for one in (back,) if one is not None]
        rated = [(out, into) for out, into in rates if out is not None and into is not None]
        out, into = max(rated, key=min) if rated else (None, None)
        trips = [one.rtt_us for one in (there, back) if one is not None and one.rtt_us is not None]
        link = msgspec.structs.replace(
            link,
            mbps=None if out is None or into is None else min(out, into),
            rtt_us=min(trips) if trips else None,
        )
        return Trial(link=link, measured=True, mbps_out=out, mbps_in=into)

    def _common(self, a: NodeId, b: NodeId, left: NodeAddress, right: NodeAddress) -> bool:
        """Whether a network's name says that the two are neighbours: loopback is another network on each machine."""
        if is_loopback(left.host) or is_loopback(right.host):
            if self._nodes[a].network_id and self._nodes[b].network_id:
                return False
            return left.network == right.network and not (self._beyond(a) and self._beyond(b))
        return left.network == right.network and left.host != right.host

    def _by_routing(self, a: NodeId, b: NodeId) -> list[Trial]:
        """Without a common network the first addresses may still reach each other, unless loopback is among them.

        In a network that the operator names, those that have one there: a VPN gives each its own, with no neighbours.
        """
        firsts = [self._beyond(name) for name in (a, b)]
        if self._network:
            firsts = [found or self._others(name) for found, name in zip(firsts, (a, b), strict=True)]
        if not all(firsts):
            return []
        left, right = firsts[0][0].host, firsts[1][0].host
        if left == right:
            return []
        return [Trial(link=Link(a=a, b=b, a_host=left, b_host=right, kind=self._kind(a, b, left, right)))]

    def _beyond(self, name: NodeId) -> list[NodeAddress]:
        there = self._offers(name)
        return [one for one in self._nodes[name].addresses if one in there and not is_loopback(one.host)]

    def _others(self, name: NodeId) -> list[NodeAddress]:
        return [one for one in self._offers(name) if not is_loopback(one.host)]

    def _record(self, a: NodeId, b: NodeId, own: str, host: str) -> Measured | None:
        """What `a` measured of the pair, towards the boot of `b` that is there."""
        records = self._measured.get(a)
        if records is None:
            told = self._links.get(a)
            fresh = told is not None and told.boot == self._nodes[a].boot
            found = told.measured if told is not None and fresh else ()
            records = self._measured[a] = {(one.other, one.own, one.host): one for one in found}
        record = records.get((b, own, host))
        return record if record is not None and record.other_boot == self._nodes[b].boot else None

    def _kind(self, a: NodeId, b: NodeId, left: str, right: str) -> InterfaceKind:
        return KINDS[max(KINDS.index(self._kind_of(a, left)), KINDS.index(self._kind_of(b, right)))]

    def _kind_of(self, name: NodeId, host: str) -> InterfaceKind:
        kinds = self._kinds.get(name)
        if kinds is None:
            facts = self._facts.get(name)
            interfaces = facts.interfaces if facts is not None else ()
            kinds = self._kinds[name] = {one.host: each.kind for each in interfaces for one in each.addresses}
        return kinds.get(host, "other")


def offered(info: NodeInfo) -> tuple[NodeAddress, ...]:
    """The addresses at which others may try the node.

    One that has joined from afar is not to be reached over loopback, whatever it saw of its interfaces before that.
    """
    beyond = [one for one in info.candidates if not is_loopback(one.host)]
    if beyond or all(is_loopback(one.host) for one in info.addresses):
        return info.candidates or info.addresses
    return info.addresses


def is_loopback(host: str) -> bool:
    """Whether a dotted address can only be reached from its own machine."""
    return host.startswith("127.")


def is_host(text: str) -> bool:
    """Whether it is a dotted IPv4 address."""
    return _number(text) is not None


def is_network(text: str) -> bool:
    """Whether it is an IPv4 network as CIDR, that of a host in it included."""
    base, _, bits = text.partition("/")
    return is_host(base) and bits.isascii() and bits.isdigit() and len(bits) <= 2 and int(bits) <= 32


def is_link_local(host: str) -> bool:
    """Whether no router passes on what is sent to a dotted address, as of a Thunderbolt cable without any server."""
    return host.startswith("169.254.")


def within(host: str, network: str) -> bool:
    """Whether a dotted address is of the network, as CIDR; not where either is no such thing."""
    base, _, bits = network.partition("/")
    one, other = _number(host), _number(base)
    if one is None or other is None or not is_network(network):
        return False
    shift = 32 - int(bits)
    return one >> shift == other >> shift


def _number(host: str) -> int | None:
    parts = host.split(".")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() and int(part) < 256 for part in parts):
        return None
    return sum(int(part) << shift for part, shift in zip(parts, (24, 16, 8, 0), strict=True))


def _fault(a: NodeId, b: NodeId, there: Measured | None, back: Measured | None) -> str:
    """Why a measured pair cannot be used: both ends have to agree on it. Empty where they do."""
    for name, other, record, reverse in ((a, b, there, back), (b, a, back, there)):
        if record is None:
            continue
        way = f"{record.own} → {record.host}"
        if record.reached and not record.dialled_back:
            why = f" ({record.error})" if record.error else ""
            return f"{name} reaches {other} by {way}, but {other} does not reach {name} back{why}"
        if not record.reached and reverse is not None and reverse.reached:
            back_way = f"{record.host} → {record.own}"
            return f"{other} reaches {name} by {back_way}, but {name} does not reach {other} back ({record.error})"
        if not record.reached:
            return f"{name} does not reach {other} by {way}: {record.error}"
    return ""


def _ranked(trials: Iterable[Trial], chosen: bool) -> list[Trial]:
    """The trials, the best first. `chosen`: the operator says which network, whatever kind it is."""
    rest = sorted(trials, key=lambda trial: _order(trial, chosen))
    ranked: list[Trial] = []
    while rest:
        place = _order(rest[0], chosen)[:2]
        tier = [trial for trial in rest if _order(trial, chosen)[:2] == place]
        rest = rest[len(tier) :]
        while tier:
            best = _best(tier)
            ranked.append(best)
            tier.remove(best)
    return ranked


def _order(trial: Trial, chosen: bool) -> tuple[int, bool, str, str]:
    """What comes before rate: that it can be used, then that it was measured, then its kind."""
    usable = 2 if trial.fault else 0 if trial.measured else 1
    return (usable, not chosen and trial.link.kind in LAST_RESORTS, trial.link.a_host, trial.link.b_host)


def _best(tier: list[Trial]) -> Trial:
    """The fastest; of those as fast as it the one with the shortest round trip, then by the text of the addresses."""
    fastest = max(trial.link.mbps or 0.0 for trial in tier)
    equal = [trial for trial in tier if (trial.link.mbps or 0.0) >= EQUAL_SHARE * fastest]
    shortest = min(_trip(trial) for trial in equal)
    near = [trial for trial in equal if _trip(trial) <= max(shortest + EQUAL_RTT_US, shortest / EQUAL_SHARE)]
    return min(near, key=lambda trial: (KINDS.index(trial.link.kind), trial.link.a_host, trial.link.b_host))


def _trip(trial: Trial) -> float:
    return float("inf") if trial.link.rtt_us is None else trial.link.rtt_us


def _reversed(trial: Trial) -> Trial:
    link = trial.link.reversed()
    return msgspec.structs.replace(trial, link=link, mbps_out=trial.mbps_in, mbps_in=trial.mbps_out)


def _networks(addresses: Iterable[NodeAddress]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.network for one in addresses))
