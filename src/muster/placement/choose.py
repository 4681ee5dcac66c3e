"""Which nodes ranks go to, and in which order: fewer, then faster, then those that hold the model. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, combinations, permutations
from typing import Final

import msgspec

from muster.links import Link
from muster.placement.cabling import APART, best_joined, joined, pockets
from muster.placement.demands import Demand, Stages
from muster.placement.rings import EXACT_NODES, UNKNOWN, Worth, best_ring, judge, ring_subsets, worth
from muster.placement.searching import lowest
from muster.placement.split import speed_classes
from muster.placement.words import Cluster, Links

#: Rates of links count as equal up to this factor, where the nodes behind them differ in something else.
_SAME_RATE: Final = 1.3
#: From so many nodes the choice among many begins, and so many neighbours of each are looked at, at least.
_SEEDS: Final = 4
_NEIGHBOURS: Final = 24
#: So many orders are tried at most until the layers fit, of all sets of nodes together; then only the best of each.
_TURNS: Final = 512
#: So many sets of nodes have all their rings looked at.
_ALL_RINGS: Final = 4


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of nodes by rank, and layers per rank (empty where the ranks have none)."""

    order: tuple[int, ...]
    split: tuple[int, ...] = ()


class Chooser:
    """Chooses from one cluster; what it has found out of links is kept. `wired`: pairs that JACCL can join."""

    def __init__(self, cluster: Cluster, links: Links, wired: Iterable[tuple[int, int]] = ()) -> None:
        self.cluster = cluster
        self.links = links
        self.wired = frozenset(wired)
        self._reach: list[int] = []  #: entry n: layers that n nodes hold at most; one model is asked about
        self._worth: dict[tuple[int, int], Worth | None] = {}
        self._number = {candidate.node: index for index, candidate in enumerate(cluster.nodes)}
        self._turns_left = self._all_rings_left = 0  #: of the arrangement that is looked for
        self._machines = len({candidate.machine for candidate in cluster.nodes}) < len(cluster.nodes)
        self.free = [
            max(0, min(candidate.free_bytes, cluster.pools.get(candidate.machine, candidate.free_bytes)))
            for candidate in cluster.nodes
        ]
        best: dict[str, float] = {}
        for candidate in cluster.nodes:
            if candidate.facts is not None and candidate.facts.memory_gbps:
                best[candidate.machine] = max(best.get(candidate.machine, 0.0), candidate.facts.memory_gbps)
        self._speeds: list[float | None] = [best.get(candidate.machine) for candidate in cluster.nodes]
        self._classes = speed_classes(self._speeds)

    def worth(self, one: int, other: int) -> Worth | None:
        """How bad the link between two nodes is; `None` where they have none."""
        key = (one, other) if one < other else (other, one)
        if key in self._worth:
            return self._worth[key]
        if one == other:
            found: Worth | None = Worth(float("-inf"), 0.0, 0)
        else:
            a, b = self.cluster.nodes[key[0]].node, self.cluster.nodes[key[1]].node
            link = self.links.between(a, b)
            found = None if link is None else worth(link)
        self._worth[key] = found
        return found

    def link(self, one: int, other: int) -> Link | None:
        """The link itself, seen from the first."""
        return self.links.between(self.cluster.nodes[one].node, self.cluster.nodes[other].node)

    def reach(self, demand: Demand) -> int:
        """So many units fit at most on as many nodes as there are ranks, each with one of them."""
        if not isinstance(demand, Stages):
            return min(demand.ranks, sum(demand.units(free) for free in self.free))
        if not self._reach:
            units = sorted((demand.units(free) for free in self.free), reverse=True)
            self._reach = [0, *accumulate(units)]
        return self._reach[min(demand.ranks, len(self.free))]

    # --- arranging --------------------------------------------------------------------------------------------

    def arrange(self, demand: Demand, *, spread: bool = True) -> Arrangement | None:
        """The best nodes for these ranks, or `None`. Without `spread` no node gets more than one rank."""
        self._turns_left, self._all_rings_left = _TURNS, _ALL_RINGS
        if self.cluster.named:
            return self._named(demand)
        usable = [
            index
            for index, candidate in enumerate(self.cluster.nodes)
            if candidate.free_ranks > 0 and demand.units(self.free[index]) > 0
        ]
        if demand.ranks <= len(usable):
            found = self._few(usable, demand) if len(usable) <= EXACT_NODES else self._many(usable, demand)
            if found is not None:
                return found
        if not spread:
            return None
        taken, _ = self.deal(usable, demand)
        if sum(taken.values()) < demand.ranks:
            return None
        return self._ordered([index for index in usable if taken[index]], taken, demand)

    def _named(self, demand: Demand) -> Arrangement | None:
        everyone = range(len(self.cluster.nodes))
        taken, _ = self.deal(everyone, demand)
        if sum(taken.values()) < demand.ranks or not all(taken.values()):
            return None
        order = tuple(index for index in everyone for _ in range(taken[index]))
        return self.fitted(order, demand) if judge(_alone(order), self.worth) is not None else None

    def deal(self, nodes: Iterable[int], demand: Demand) -> tuple[dict[int, int], dict[int, int]]:
        """How many ranks each node gets, and what it has left then: the next one to the one that has fewest.

        Of these to the emptiest. All ranks together are fewer than asked for where there is no room for more.
        """
        left = {index: self.free[index] for index in nodes}
        pools = dict(self.cluster.pools)
        taken = dict.fromkeys(left, 0)
        heap = [(0, -free, index) for index, free in left.items()]
        heapq.heapify(heap)
        dealt = 0
        while dealt < demand.ranks and heap:
            _, _, index = heapq.heappop(heap)
            candidate = self.cluster.nodes[index]
            room = min(left[index], pools.get(candidate.machine, left[index]))
            if taken[index] >= candidate.free_ranks or room < demand.least_bytes:
                continue
            taken[index] += 1
            dealt += 1
            left[index] -= demand.least_bytes
            if candidate.machine in pools:
                pools[candidate.machine] -= demand.least_bytes
            heapq.heappush(heap, (taken[index], -left[index], index))
        return taken, {
            index: min(free, pools.get(self.cluster.nodes[index].machine, free)) for index, free in left.items()
        }

    def _ordered(self, nodes: Sequence[int], taken: dict[int, int], demand: Demand) -> Arrangement | None:
        """The nodes in the order of the best ring in which the layers fit, each with its ranks side by side."""
        ring = best_ring(nodes, self.worth)
        if ring is None:
            return None
        for order in chain([ring], self._rings(nodes)):
            for turned in _turns(order):
                ranks = tuple(index for index in turned for _ in range(taken[index]))
                if demand.may_fit(self.shares(ranks)):
                    self._turns_left -= 1
                    found = self.fitted(ranks, demand)
                    if found is not None or self._turns_left <= 0:
                        return found
            if not isinstance(demand, Stages):
                return None
        return None

    def _rings(self, nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """All rings of a few nodes, the best first: the layers may fit in another order than the best one."""
        if not 3 < len(nodes) <= EXACT_NODES or self._all_rings_left <= 0:
            return
        self._all_rings_left -= 1
        found: list[tuple[Worth, int, tuple[int, ...]]] = []
        for rest in permutations(nodes[1:]):
            judged = judge((nodes[0], *rest), self.worth) if rest[0] < rest[-1] else None
            if judged is not None:
                found.append((*judged, (nodes[0], *rest)))
        yield from (order for _, _, order in sorted(found))

    def fitted(self, order: tuple[int, ...], demand: Demand) -> Arrangement | None:
        """These nodes by rank, with the layers that they get; `None` where those do not fit."""
        split = demand.split(self.shares(order), speed_classes([self._speeds[index] for index in order]))
        return None if split is None else Arrangement(order=order, split=split)

    def shares(self, order: Sequence[int]) -> list[int]:
        """What each rank may take: nodes, and machines with several nodes, share evenly as far as each can take it."""
        count = {index: order.count(index) for index in set(order)} if len(set(order)) < len(order) else {}
        found = [self.free[index] // count.get(index, 1) for index in order]
        if not count and not self._machines:
            return found
        for machine in {self.cluster.nodes[index].machine for index in order}:
            ranks = [rank for rank, index in enumerate(order) if self.cluster.nodes[index].machine == machine]
            left = self.cluster.pools.get(machine)
            if left is None or sum(found[rank] for rank in ranks) <= left:
                continue
            for position, rank in enumerate(sorted(ranks, key=lambda rank: (found[rank], rank))):
                found[rank] = min(found[rank], max(0, left) // (len(ranks) - position))
                left -= found[rank]
        return found

    # --- few nodes: every set of them -------------------------------------------------------------------------

    def _few(self, usable: list[int], demand: Demand) -> Arrangement | None:
        sets = {
            sum(1 << position for position in chosen): [usable[position] for position in chosen]
            for chosen in combinations(range(len(usable)), demand.ranks)
        }
        sets = {bits: nodes for bits, nodes in sets.items() if self._holds(nodes, demand)}
        while sets:
            bits = self._best(sets, usable, demand.ranks)
            if bits is None:
                return None
            found = self._ordered(sets.pop(bits), dict.fromkeys(usable, 1), demand)
            if found is not None:
                return found
        return None

    def _holds(self, nodes: Sequence[int], demand: Demand) -> bool:
        return demand.may_fit_somehow(self.shares(nodes))

    def _best(self, sets: dict[int, list[int]], usable: list[int], size: int) -> int | None:
        """Of these sets, the one with the best backend, then link, speed and models; `None` where none has a ring."""
        left = set(sets)
        if len(usable) == 1 or size == 1:
            return min(left, key=lambda bits: self._key(sets[bits]))
        table = [[None if a == b else self.worth(a, b) for b in usable] for a in usable]
        levels = sorted({link for row in table for link in row if link is not None})
        number = {link: position for position, link in enumerate(levels)}
        level = [[len(levels) if link is None else number[link] for link in row] for row in table]
        if self.wired:
            left = best_joined(left & ring_subsets(level, len(levels) - 1, size), usable, size, self.wired)
        best = lowest(len(levels), lambda most: bool(left & ring_subsets(level, most, size)))
        if best == len(levels):
            return None
        similar = max(index for index, link in enumerate(levels) if link.rate <= levels[best].rate / _SAME_RATE)
        left &= ring_subsets(level, max(best, similar), size)
        first = min(self._key(sets[bits])[:2] for bits in left)
        left = {bits for bits in left if self._key(sets[bits])[:2] == first}
        if len(left) > 1 and similar > best:
            last = lowest(similar, lambda most: bool(left & ring_subsets(level, most, size)))
            left &= ring_subsets(level, last, size)
        return min(left, key=lambda bits: self._key(sets[bits]))

    def _key(self, nodes: Sequence[int]) -> tuple[tuple[float, float], int, int, tuple[int, ...]]:
        """Slow, then without the model, then with little memory, then late in the order: the lower the better."""
        speeds = [self._classes[index] for index in nodes]
        lacking = sum(not self.cluster.nodes[index].holds for index in nodes)
        return (-min(speeds), -sum(speeds)), lacking, -sum(self.free[index] for index in nodes), tuple(nodes)

    # --- many nodes: good sets --------------------------------------------------------------------------------

    def _many(self, usable: list[int], demand: Demand) -> Arrangement | None:
        ranked = sorted(usable, key=lambda index: self._key((index,)))
        if demand.ranks == 1:
            return self._ordered(ranked[:1], dict.fromkeys(usable, 1), demand)
        allowed = set(usable)
        if demand.ranks == len(usable):
            return self._ordered(usable, dict.fromkeys(usable, 1), demand)
        if self.wired and (cabled := self._pocketed(ranked, demand)) is not None:
            return cabled
        tried: list[tuple[Worth, int, int, Arrangement]] = []
        for position, seed in enumerate(self._seeds(ranked, allowed)):
            nodes = self._around(seed, ranked, allowed, demand)
            if nodes is None:
                continue
            found = self._ordered(sorted(nodes), dict.fromkeys(nodes, 1), demand)
            judged = None if found is None else judge(found.order, self.worth)
            if found is not None and judged is not None:
                tried.append((judged[0], judged[1], position, found))
        if tried:
            return min(tried, key=lambda one: one[:3])[3]
        for island in self._islands(usable):
            if demand.ranks <= len(island) < len(usable):
                found = self._few(island, demand) if len(island) <= EXACT_NODES else self._many(island, demand)
                if found is not None:
                    return found
        biggest = sorted(ranked, key=lambda index: -demand.units(self.free[index]))[: demand.ranks]
        if not self._holds(biggest, demand):
            return None
        return self._ordered(sorted(biggest), dict.fromkeys(biggest, 1), demand)

    def _pocketed(self, ranked: list[int], demand: Demand) -> Arrangement | None:
        """The best nodes that JACCL can join, in a mesh or else in a ring; `None` where there are none."""
        found: list[tuple[int, tuple[object, ...], Arrangement]] = []
        for nodes in pockets(ranked, self.wired, demand.ranks):
            if demand.ranks <= EXACT_NODES:
                arranged = self._few(nodes, demand)
            else:
                fits_in = self._holds(nodes, demand)
                arranged = self._ordered(nodes, dict.fromkeys(nodes, 1), demand) if fits_in else None
            how = APART if arranged is None else joined(arranged.order, self.wired)
            if arranged is not None and how != APART:
                found.append((how, self._key(sorted(arranged.order)), arranged))
        return min(found, key=lambda one: one[:2])[2] if found else None

    def _seeds(self, ranked: list[int], allowed: set[int]) -> list[int]:
        """The best nodes, and those with the best link of all that were looked at."""
        linked: list[tuple[Worth, int]] = []
        fastest = [self._number[name] for name in self.links.fastest(_NEIGHBOURS) if name in self._number]
        for index in dict.fromkeys([*ranked[:_NEIGHBOURS], *(one for one in fastest if one in allowed)]):
            near = next((one for one in self._near(index, 1) if one in allowed), None)
            link = None if near is None else self.worth(index, near)
            if link is not None and link < UNKNOWN:
                linked.append((link, index))
        found = [*ranked[: _SEEDS // 2], *(index for _, index in sorted(linked)[: _SEEDS // 2])]
        return list(dict.fromkeys(found))

    def _islands(self, usable: list[int]) -> list[list[int]]:
        """The nodes that reach each other, by way of others, too; those of the first node first."""
        left, found = set(usable), list[list[int]]()
        for start in usable:
            if start not in left:
                continue
            left.discard(start)
            island = [start]
            for index in island:
                reached = [other for other in self._near(index, len(self._number)) if other in left]
                left.difference_update(reached)
                island += reached
            found.append(sorted(island))
        return found

    def _near(self, index: int, limit: int) -> list[int]:
        names = self.links.nearest(self.cluster.nodes[index].node, limit)
        return [self._number[name] for name in names if name in self._number]

    def _around(self, seed: int, ranked: list[int], allowed: set[int], demand: Demand) -> list[int] | None:
        """The seed and its best neighbours, where they hold all."""
        others = demand.ranks - 1
        near = [index for index in self._near(seed, max(_NEIGHBOURS, 2 * others)) if index in allowed]
        pool = [one for one in dict.fromkeys([*near, *ranked[: max(_NEIGHBOURS, 2 * others)]]) if one != seed]
        links = {index: self.worth(seed, index) for index in pool}
        rates = {index: link for index, link in links.items() if link is not None}
        if len(rates) < others:
            return None
        place = {index: position for position, index in enumerate(ranked)}
        by_rate = sorted(rates, key=lambda index: (rates[index].rate, place[index]))
        limit = rates[by_rate[others - 1]].rate / _SAME_RATE  #: what the best set of neighbours has at its worst
        similar = [index for index in by_rate if rates[index].rate <= limit]
        for order in (
            sorted(similar, key=lambda index: place[index]),
            by_rate,
            sorted(rates, key=lambda index: (-demand.units(self.free[index]), place[index])),
        ):
            nodes = [seed, *order[:others]]
            if len(nodes) == demand.ranks and self._holds(nodes, demand):
                return nodes
        return None


def _alone(order: Sequence[int]) -> list[int]:
    """The nodes of the ranks, each once."""
    return list(dict.fromkeys(order))


def _turns(ring: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """The same ring, begun at each of its nodes, in both directions; as it is first."""
    for one in (ring, (ring[0], *reversed(ring[1:]))):
        for start in range(len(ring)):
            yield one[start:] + one[:start]
