"""Random clusters, and the best placement on each of them, found by trying everything."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations, permutations

import msgspec

from muster.facts import NodeFacts
from muster.links import Link
from muster.needs import LayerNeeds, ModelNeeds, SharedSize
from muster.placement import Candidate, Cluster, Placement
from muster.placement.costs import with_headroom
from muster.predict import rank_memory
from muster.spec import BootId, InstanceSpec, ModelWorkload, NodeAddress, NodeId, NodeInfo

GIB = 2**30
MIB = 2**20


def model(layers: int = 12, layer_bytes: int = GIB // 2, *, kv: int = 4096, tensor: bool = True) -> ModelNeeds:
    """A model of equal layers that can be sharded in both ways, tensor at 2, 4 and 8 ranks."""
    return ModelNeeds(
        model="org/model",
        model_type="test",
        layers=(LayerNeeds(layer_bytes, layer_bytes, kv),) * layers,
        outside_bytes=200 * MIB,
        embedding_bytes=100 * MIB,
        head_bytes=100 * MIB,
        vocabulary=1000,
        context_tokens=32768,
        tensor=tensor,
        pipeline=True,
        tensor_sizes=(2, 4, 8) if tensor else (),
        shared_sizes=(SharedSize("num_attention_heads", 8),),
        no_tensor="" if tensor else "mlx-lm cannot",
    )


def wish(ranks: int = 1, **fields: object) -> InstanceSpec:
    """A model that is wished for with little cache; `workload_…` are fields of the workload."""
    inner = {name.removeprefix("workload_"): fields.pop(name) for name in list(fields) if name.startswith("workload_")}
    workload = ModelWorkload(**{"model": "org/model", "prompt_cache_bytes": 0, **inner})  # pyright: ignore[reportArgumentType]
    return InstanceSpec(workload=workload, ranks=ranks, **fields)  # pyright: ignore[reportArgumentType]


def node(
    name: str,
    free_bytes: int,
    *,
    machine: str = "",
    gbps: float | None = None,
    holds: bool = False,
    ranks: int = 8,
    backends: tuple[str, ...] = ("ring",),
) -> Candidate:
    """A candidate with so much room."""
    info = NodeInfo(
        node=NodeId(name),
        boot=BootId(f"{name}-boot"),
        hostname=name,
        machine=machine or f"machine-{name}",
        pid=1,
        addresses=(NodeAddress(host="10.0.0.1", network="10.0.0.0/24"),),
        backends=backends,
        memory_bytes=free_bytes,
        max_ranks=ranks,
        peer_port=7000,
    )
    facts = NodeFacts(node=info.node, boot=info.boot, memory_gbps=gbps) if gbps is not None else None
    return Candidate(info=info, free_bytes=free_bytes, free_ranks=ranks, facts=facts, holds=holds)


class Table:
    """Links as a table of (Mbit/s, µs) by pair of names; a pair that is not in it has no link.

    `asked` counts how often a link was asked for.
    """

    def __init__(self, rates: dict[tuple[str, str], tuple[float, float]]) -> None:
        self.rates = rates
        self.asked = 0

    def rate(self, a: str, b: str) -> tuple[float, float] | None:
        """Mbit/s and µs between the two."""
        return self.rates.get((a, b)) or self.rates.get((b, a))

    def between(self, a: NodeId, b: NodeId) -> Link | None:
        """As `muster.links.LinkMap` has it; addresses are made up of the names."""
        self.asked += 1
        found = self.rate(a, b)
        if found is None:
            return None
        return Link(a=a, b=b, a_host=f"{a}-{b}", b_host=f"{b}-{a}", kind="ethernet", mbps=found[0], rtt_us=found[1])

    def why_not(self, a: NodeId, b: NodeId) -> str:
        """Why there is none; empty where there is one."""
        return "" if self.rate(a, b) else f"{a} does not reach {b}"

    def nearest(self, a: NodeId, limit: int) -> tuple[NodeId, ...]:
        """The nodes with the best rates."""
        found = [
            (-rate[0], one if other == a else other) for (one, other), rate in self.rates.items() if a in (one, other)
        ]
        return tuple(NodeId(name) for _, name in sorted(found)[:limit])

    def fastest(self, limit: int) -> tuple[NodeId, ...]:
        """The nodes with the best rates, by name where they are equal."""
        best: dict[str, float] = {}
        for names, rate in self.rates.items():
            best.update({name: min(best.get(name, 0.0), -rate[0]) for name in names})
        return tuple(NodeId(name) for name in sorted(best, key=lambda name: (best[name], name))[:limit])


def full_mesh(names: Iterable[str], mbps: float = 10_000.0, rtt_us: float = 100.0) -> Table:
    """Everybody reaches everybody as well as anybody."""
    return Table(dict.fromkeys(combinations(sorted(names), 2), (mbps, rtt_us)))


def random_cluster(draw: random.Random, most: int = 8) -> tuple[Cluster, Table, ModelNeeds, InstanceSpec]:
    """Up to `most` nodes with random room, speeds and links, and a wish that may or may not fit."""
    names = [f"n{number}" for number in range(draw.randint(1, most))]
    speeds = draw.choice([[None], [100.0], [100.0, 400.0], [80.0, 100.0, 250.0]])
    nodes = tuple(
        node(
            name,
            int(draw.uniform(0.3, 7.0) * GIB),
            gbps=draw.choice(speeds),
            holds=draw.random() < 0.3,
            machine=draw.choice(["shared", ""]) if draw.random() < 0.15 else "",
        )
        for name in names
    )
    noise = draw.random() < 0.5
    rates = {
        pair: (
            draw.choice([940.0, 2350.0, 9400.0, 38_000.0]) * (draw.uniform(0.97, 1.0) if noise else 1.0),
            float(draw.choice([30, 100, 300])),
        )
        for pair in combinations(names, 2)
        if draw.random() < 0.9
    }
    needs = model(draw.randint(2, 14), draw.choice([GIB // 4, GIB // 2, GIB]))
    ranks = draw.randint(1, len(names))
    spec = wish(
        ranks,
        auto_ranks=draw.random() < 0.4,
        workload_sharding=draw.choice(["pipeline", "pipeline", "tensor"]),
    )
    pools = {"shared": int(draw.uniform(1, 8) * GIB)}
    return Cluster(nodes=nodes, pools=pools), Table(rates), needs, spec


# --- the oracle -------------------------------------------------------------------------------------------------


def worst_of(order: Sequence[str], links: Table) -> tuple[float, float] | None:
    """The worst link of the ring: least Mbit/s, then most µs, both so that more is worse; `None` where one misses."""
    if len(order) == 1:
        return (float("-inf"), 0.0)
    found = [links.rate(order[index - 1], order[index]) for index in range(len(order))]
    if any(one is None for one in found):
        return None
    return max((-one[0], one[1]) for one in found if one is not None)


def cost_of(order: Sequence[str], links: Table) -> int:
    """What a message of 64 KiB takes on all links of the ring together, in ns."""
    pairs = {frozenset((order[index - 1], order[index])) for index in range(len(order))} if len(order) > 1 else set()
    rates = [links.rate(*sorted(pair)) for pair in pairs]
    return sum(round(one[1] * 1000 + 65536 * 8000 / one[0]) for one in rates if one is not None)


def demand_of(needs: ModelNeeds, spec: InstanceSpec, sharding: str, size: int, layers: range) -> int:
    """What must be free for a rank, by the prediction that the ranks are measured against."""
    assert isinstance(spec.workload, ModelWorkload)
    found = rank_memory(
        needs,
        sharding,  # pyright: ignore[reportArgumentType]
        size,
        layers,
        context_tokens=8192,
        sequences=1,
        prefill_chunk_tokens=spec.workload.prefill_chunk_tokens,
    )
    return with_headroom(found.total)


def room_of(cluster: Cluster, chosen: Sequence[int]) -> list[int]:
    """What each rank may take, one per node: a machine's pool is shared evenly, as far as each can take it."""
    free = [max(0, cluster.nodes[index].free_bytes) for index in chosen]
    for machine, pool in cluster.pools.items():
        ranks = [rank for rank, index in enumerate(chosen) if cluster.nodes[index].machine == machine]
        left = pool
        for count, rank in zip(range(len(ranks), 0, -1), sorted(ranks, key=lambda rank: free[rank]), strict=True):
            free[rank] = min(free[rank], left // count)
            left -= free[rank]
    return free


def capacities(
    cluster: Cluster, chosen: Sequence[int], needs: ModelNeeds, spec: InstanceSpec
) -> dict[int, tuple[int, int, int]]:
    """How many layers each of these nodes holds at most: as the first rank, in the middle, as the last rank."""
    count, size = len(needs.layers), len(chosen)
    found: dict[int, tuple[int, int, int]] = {}
    for index, room in zip(chosen, room_of(cluster, chosen), strict=True):
        most = [0, 0, 0]
        for kind in range(3):
            for layers in range(1, count - size + 2):
                start = (count - layers, 1, 0)[kind]
                part = range(start, start + layers)
                if demand_of(needs, spec, "pipeline", size, part) > room:
                    break
                most[kind] = layers
        found[index] = (most[0], most[1], most[2])
    return found


def whole_fits(cluster: Cluster, chosen: Sequence[int], needs: ModelNeeds, spec: InstanceSpec) -> bool:
    """Whether each of these nodes can hold what is the same on all of them."""
    assert isinstance(spec.workload, ModelWorkload)
    size = len(chosen)
    sharding = "none" if size == 1 else "tensor"
    each = demand_of(needs, spec, sharding, size, range(len(needs.layers)))
    return (size == 1 or size in needs.tensor_sizes) and all(each <= room for room in room_of(cluster, chosen))


def stages_fit(order: Sequence[int], most: dict[int, tuple[int, int, int]], layers: int) -> bool:
    """Whether a pipeline of equal layers fits on the nodes in this order."""
    held = [most[index][0 if rank == 0 else 2 if rank == len(order) - 1 else 1] for rank, index in enumerate(order)]
    return min(held) >= 1 and sum(held) >= layers


def best_of(
    cluster: Cluster, links: Table, needs: ModelNeeds, spec: InstanceSpec
) -> tuple[int, tuple[float, float]] | None:
    """The size and the worst link of the best ring, over every set and every order; `None` where nothing fits.

    Among the sets whose worst link is about as good as the best one's, those of the fastest nodes count, then those
    that lack the model on the fewest, and of these the best worst link.
    """
    assert isinstance(spec.workload, ModelWorkload)
    everyone = range(len(cluster.nodes))
    for size in range(spec.ranks, len(cluster.nodes) + 1 if spec.auto_ranks else spec.ranks + 1):
        found: list[tuple[tuple[int, ...], tuple[float, float]]] = []
        for chosen in combinations(everyone, size):
            same = size == 1 or spec.workload.sharding == "tensor"
            if same and not whole_fits(cluster, chosen, needs, spec):
                continue
            most = {} if same else capacities(cluster, chosen, needs, spec)
            rings = [
                worst
                for order in permutations(chosen)
                if same or stages_fit(order, most, len(needs.layers))
                if (worst := worst_of([cluster.nodes[index].node for index in order], links)) is not None
            ]
            if rings:
                found.append((chosen, min(rings)))
        if found:
            top = min(worst for _, worst in found)
            similar = [one for one in found if one[1][0] <= top[0] / 1.3]
            return size, min(similar, key=lambda one: (*_merit(cluster, one[0]), one[1]))[1]
    return None


def _merit(cluster: Cluster, chosen: Sequence[int]) -> tuple[float, float, int]:
    best: dict[str, float] = {}
    for candidate in cluster.nodes:
        if candidate.facts is not None and candidate.facts.memory_gbps is not None:
            best[candidate.machine] = max(best.get(candidate.machine, 0.0), candidate.facts.memory_gbps)
    speeds = [best.get(cluster.nodes[index].machine) for index in range(len(cluster.nodes))]
    known = all(speed is not None for speed in speeds)
    heads: dict[float, float] = {}
    head = 0.0
    for speed in sorted({speed or 0.0 for speed in speeds}, reverse=True):
        head = head if head and speed * 1.3 >= head else speed
        heads[speed] = head
    classes = [heads[speeds[index] or 0.0] if known else 1.0 for index in chosen]
    return -min(classes), -sum(classes), sum(not cluster.nodes[index].holds for index in chosen)


def nodes_of(placement: Placement) -> list[str]:
    """The nodes by rank."""
    return [one.node for one in placement.assignments]


def replaced(spec: InstanceSpec, **fields: object) -> InstanceSpec:
    """The wish with these fields replaced."""
    return msgspec.structs.replace(spec, **fields)
