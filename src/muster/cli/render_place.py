"""Placements for people: `muster place`, and what `create` has chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from muster.cli.render import cell, rate, size, table
from muster.layout import Layout
from muster.replies import Option, Previewed
from muster.spec import Backend

#: So many other ways, and reasons against further ones, are shown.
_MOST = 12


def preview_view(model: str, found: Previewed) -> RenderableType:
    """What would be taken, what else would do, and what would not."""
    fitting = [option for option in found.options if not option.refusal]
    failing = [option for option in found.options if option.refusal]
    parts: list[RenderableType] = []
    if fitting and not found.options[0].refusal:
        first = fitting[0]
        nodes = [one.node for one in first.assignments]
        parts.append(cell(f"{model} would go to {choice(nodes, first.backend, first.layout)}", "bold"))
        parts.append(_ranks(first))
        parts += [cell(reason, "dim") for reason in first.layout.steps_down]
        if found.unknown:
            parts.append(cell(f"memory is a guess: nobody could say what the model needs: {found.unknown}", "yellow"))
        others = fitting[1:]
    else:
        reason = found.options[0].refusal if found.options else "nothing fits"
        parts.append(cell(f"refused: {reason}", "bold red"))
        parts += [cell(f"what would help: {remedy}") for remedy in found.remedies]
        failing = failing[1:]
        others = fitting
    if others:
        parts += [Text(), cell("what else would do", "bold"), _others(others[:_MOST])]
    if failing:
        parts += [Text(), cell("what would not", "bold")]
        parts += [cell(f"  {option.refusal}") for option in failing[:_MOST]]
    return Group(*parts)


def choice(nodes: Sequence[str], backend: Backend, layout: Layout) -> str:
    """The placement in a line: "2 ranks on a, b: pipeline of 20+12 layers, ring, 9.4 Gbit/s at least"."""
    places = ", ".join(dict.fromkeys(nodes))
    counted = f"{len(nodes)} {'rank' if len(nodes) == 1 else 'ranks'} on {places}"
    if len(nodes) == 1:
        return counted
    words = [_sharding(layout), _backend(backend, layout), _slowest(layout)]
    return f"{counted}: {', '.join(word for word in words if word)}"


def _backend(backend: Backend, layout: Layout) -> str:
    return backend if backend == "ring" else f"jaccl {'ring' if layout.jaccl_ring else 'mesh'}"


def _sharding(layout: Layout) -> str:
    if layout.sharding == "pipeline":
        return f"pipeline of {'+'.join(map(str, layout.split))} layers"
    return "tensor sharding" if layout.sharding == "tensor" else ""


def _slowest(layout: Layout) -> str:
    rates = [rank.next.mbps for rank in layout.ranks if rank.next is not None and rank.next.mbps is not None]
    return f"{rate(min(rates))} at least" if rates else ""


def _ranks(option: Option) -> RenderableType:
    found = table("RANK", "NODE", "LAYERS", "MEMORY", "WEIGHTS", "CACHE", "LINK TO NEXT", "COPIED FROM")
    for one, rank in zip(option.assignments, option.layout.ranks, strict=True):
        found.add_row(
            cell(str(one.rank)),
            cell(one.node),
            cell(str(rank.layers or "")),
            cell(size(rank.memory_bytes)),
            cell(size(rank.weights_bytes) if rank.weights_bytes else ""),
            cell(size(rank.cache_bytes) if rank.cache_bytes else ""),
            cell(" ".join(_link(option.layout, one.rank))),
            cell(rank.sources[0].node if rank.sources else ""),
        )
    return found


def _link(layout: Layout, rank: int) -> Iterator[str]:
    link = layout.ranks[rank].next
    if link is None:
        return
    yield f"{link.own} → {link.host}"
    yield link.kind
    if link.mbps is not None:
        yield rate(link.mbps)
    if link.rtt_us is not None:
        yield f"{link.rtt_us:.0f} µs"


def _others(options: Sequence[Option]) -> RenderableType:
    found = table("RANKS", "NODES", "SHARDING", "BACKEND", "LARGEST RANK", "SLOWEST LINK")
    for option in options:
        layout = option.layout
        found.add_row(
            cell(str(len(option.assignments))),
            cell(",".join(dict.fromkeys(one.node for one in option.assignments))),
            cell(_sharding(layout) or "none"),
            cell(_backend(option.backend, layout) if len(option.assignments) > 1 else ""),
            cell(size(max(rank.memory_bytes for rank in layout.ranks))),
            cell(_slowest(layout).removesuffix(" at least")),
        )
    return found
