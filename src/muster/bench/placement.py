"""`muster bench placement`: how fast placements are decided, and whether they are the best there are."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import anyio.to_thread
import msgspec

from muster.bench.machine import this_machine
from muster.bench.random_clusters import GIB, best_of, model, nodes_of, random_cluster, wish, worst_of
from muster.bench.report import AtLeast, AtMost, Figure, Report, figure
from muster.errors import PlacementError
from muster.facts import NodeFacts
from muster.known import Known
from muster.links import Measured, NodeLinks
from muster.needs import ModelNeeds
from muster.placement import Placement, place
from muster.placement.core import place as choose
from muster.spec import BootId, InstanceSpec, NodeAddress, NodeId, NodeInfo
from muster.state import Node, State

#: Nodes that a worker of a large cluster measures: its neighbours, and some beyond.
_MEASURED: Final = 40
_PORT: Final = 5714


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often each cluster is placed on, and on how many random ones the choice is judged."""

    rounds: int = 15
    clusters: int = 2000


QUICK: Final = PlacementSettings(rounds=2, clusters=20)


async def measure(settings: PlacementSettings, directory: Path, say: Callable[[str], None]) -> Report:
    """Measure in a thread, so that a signal can end it."""
    del directory
    return await anyio.to_thread.run_sync(lambda: _measure(settings, say), abandon_on_cancel=True)


def _measure(settings: PlacementSettings, say: Callable[[str], None]) -> Report:
    figures: list[Figure] = []
    for case in _cases():
        say(case.name)
        figures.append(_timed(case, settings.rounds))
    say(f"{settings.clusters} random clusters beside brute force")
    figures.append(_quality(settings.clusters))
    notes = ("from state, facts and measured links to the layout; nothing is kept from one placement to the next",)
    return Report(machine=this_machine(), figures=tuple(figures), rounds=(), notes=notes)


class _Case(msgspec.Struct, frozen=True):
    """So many nodes, each with measured links to so many others, and what is placed on them within the bar, in ms."""

    name: str
    nodes: int
    measured: int
    spec: InstanceSpec
    needs: ModelNeeds
    milliseconds: float
    refused: bool = False  #: with advice


def _cases() -> list[_Case]:
    large, few = model(60, GIB // 2), wish(1, auto_ranks=True)
    heavy, too_heavy = (_with_heavy_ends(layer_bytes) for layer_bytes in (GIB * 9 // 10, GIB * 11 // 10))
    return [
        _Case("8 nodes, full mesh, 8 ranks", 8, 7, wish(8), large, 5.0),
        _Case("8 nodes, full mesh, as few ranks as fit", 8, 7, few, large, 5.0),
        _Case("8 nodes, heavy embedding and head, as few ranks as fit", 8, 7, few, heavy, 5.0),
        _Case("8 nodes, refused for embedding and head, with advice", 8, 7, wish(8), too_heavy, 100.0, refused=True),
        _Case("100 nodes, full mesh, 8 ranks", 100, 99, wish(8), large, 15.0),
        _Case("100 nodes, full mesh, as few ranks as fit", 100, 99, few, large, 15.0),
        _Case("1,000 nodes, 8 ranks", 1000, _MEASURED, wish(8), large, 50.0),
        _Case("1,000 nodes, as few ranks as fit", 1000, _MEASURED, few, large, 50.0),
    ]


def _with_heavy_ends(layer_bytes: int) -> ModelNeeds:
    """A model of which the first and the last rank hold few layers: in most orders of the nodes it does not fit."""
    found = model(48, layer_bytes, tensor=False)
    return msgspec.structs.replace(found, outside_bytes=6 * GIB, embedding_bytes=3 * GIB, head_bytes=3 * GIB)


def cluster(count: int, measured: int) -> tuple[State, Known]:
    """So many nodes of 6 to 12 GiB, each with measured links to so many of those that follow it."""
    draw = random.Random(count)
    names = [NodeId(f"n{number:04}") for number in range(count)]
    infos = {name: _info(name, number, draw) for number, name in enumerate(names)}
    rates: dict[tuple[int, int], tuple[float, float]] = {}
    told: dict[NodeId, NodeLinks] = {}
    for number, name in enumerate(names):
        others = sorted({(number + step) % count for step in range(1, measured + 1)} - {number})
        for other in others:
            pair = (min(number, other), max(number, other))
            rates.setdefault(pair, (draw.choice([940.0, 9400.0, 38_000.0]) * draw.uniform(0.95, 1), 80.0))
        told[name] = NodeLinks(
            node=name,
            boot=infos[name].boot,
            measured=tuple(
                _measured(infos[name], infos[names[other]], rates[min(number, other), max(number, other)])
                for other in others
            ),
        )
    facts = {
        name: NodeFacts(node=name, boot=info.boot, memory_gbps=draw.choice([100.0, 110.0, 400.0]))
        for name, info in infos.items()
    }
    state = State(nodes={name: Node(info=info, since_ns=0) for name, info in infos.items()})
    available = {name: info.memory_bytes for name, info in infos.items()}
    return state, Known(facts=facts, links=told, available_bytes=available)


def _info(name: NodeId, number: int, draw: random.Random) -> NodeInfo:
    address = NodeAddress(host=f"10.0.{number // 250}.{number % 250 + 1}", network="10.0.0.0/16")
    return NodeInfo(
        node=name,
        boot=BootId(f"{name}-boot"),
        hostname=name,
        machine=name,
        pid=1,
        addresses=(address,),
        candidates=(address,),
        backends=("ring",),
        memory_bytes=draw.randint(6, 12) * GIB,
        max_ranks=4,
        peer_port=_PORT,
    )


def _measured(one: NodeInfo, other: NodeInfo, rate: tuple[float, float]) -> Measured:
    return Measured(
        other=other.node,
        other_boot=other.boot,
        own=one.addresses[0].host,
        host=other.addresses[0].host,
        reached=True,
        dialled_back=True,
        rtt_us=rate[1],
        mbps_out=rate[0],
        mbps_in=rate[0],
    )


def _timed(case: _Case, rounds: int) -> Figure:
    state, known = cluster(case.nodes, case.measured)
    seconds: list[float] = []
    found: Placement | None = None
    for _ in range(rounds):
        begin = time.perf_counter()
        with contextlib.suppress(PlacementError):
            found = place(case.spec, state, known, case.needs)
        seconds.append(time.perf_counter() - begin)
    assert (found is None) == case.refused, case.name
    ranks = f" ({len(found.assignments)} ranks)" if found is not None and case.spec.auto_ranks else ""
    bar = AtMost(limit=case.milliseconds / 1000, text=f"≤ {case.milliseconds:g} ms")
    return msgspec.structs.replace(
        figure(f"{case.name}{ranks}", "s", median(seconds), bar=bar), worst=max(seconds), count=rounds
    )


def _quality(clusters: int) -> Figure:
    """The share of random clusters whose placement has the size and the worst link that trying everything finds."""
    draw = random.Random(5)
    equal = judged = 0
    while judged < clusters:
        nodes, links, needs, spec = random_cluster(draw)
        best = best_of(nodes, links, needs, spec)
        found = choose(nodes, links, needs, spec)
        if best is None:
            if isinstance(found, Placement) and len(set(nodes_of(found))) == len(found.assignments):
                judged += 1  # a placement where trying everything found none
            continue
        judged += 1
        if isinstance(found, Placement):
            equal += (len(found.assignments), worst_of(nodes_of(found), links)) == best
    bar = AtLeast(limit=1.0, text="all")
    return msgspec.structs.replace(
        figure("best worst link of brute force, random clusters up to 8 nodes", "", equal / clusters, bar=bar),
        worst=equal / clusters,
        count=clusters,
    )
