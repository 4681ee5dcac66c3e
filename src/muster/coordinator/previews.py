"""Where an instance would go, without creating it."""

from __future__ import annotations

import msgspec

from muster.coordinator import intake
from muster.coordinator.find import refusal
from muster.errors import MusterError
from muster.known import Known
from muster.needs import ModelNeeds
from muster.placement import Placement, Refusal, alternatives, decide
from muster.protocol import Preview
from muster.replies import Option, Previewed, Refused
from muster.spec import Phase
from muster.state import State


def preview(
    state: State, known: Known, request: Preview, needs: ModelNeeds | None, weights_bytes: int = 0
) -> Previewed | Refused:
    """What would be taken or why nothing is, then what else would do, then what would not; nothing is logged. Pure.

    Dozens of placements are tried, which takes a second in a cluster of a thousand nodes: use a thread.
    Refused is only what cannot be asked for at all; what does not fit is told as an option that is none.
    """
    try:
        spec = intake.checked(request.spec, state)
    except MusterError as error:
        return refusal(error, Phase.PLACING)
    if not any(node.lost is None for node in state.nodes.values()):
        return _nowhere(state, request)
    first = decide(spec, state, known, needs, weights_bytes=weights_bytes)
    others = [_option(found) for _, found in alternatives(spec, state, known, needs, weights_bytes=weights_bytes)]
    options: dict[tuple[object, ...], Option] = {}
    for option in [_option(first), *sorted(others, key=lambda option: bool(option.refusal))]:
        options.setdefault(_key(option), option)
    remedies = first.remedies if isinstance(first, Refusal) else ()
    told = list(options.values())
    if isinstance(first, Refusal):  # of the others as well it would be too much, with many nodes
        told[0] = msgspec.structs.replace(told[0], shortfalls=first.shortfalls)
    return Previewed(options=tuple(told), needs=needs, remedies=remedies)


def _nowhere(state: State, request: Preview) -> Refused:
    found = decide(request.spec, state)
    assert isinstance(found, Refusal), "there is no node"
    return intake.unplaced(found)


def _option(found: Placement | Refusal) -> Option:
    if isinstance(found, Refusal):
        return Option(refusal=found.message)
    return Option(assignments=found.assignments, backend=found.backend, layout=found.layout)


def _key(option: Option) -> tuple[object, ...]:
    nodes = tuple(one.node for one in option.assignments)
    layout = option.layout
    return (option.refusal, option.backend, layout.jaccl_ring, layout.sharding, layout.split, nodes)
