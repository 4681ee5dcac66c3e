"""Where an instance would go, without creating it."""

from __future__ import annotations

from muster.coordinator import intake
from muster.coordinator.find import refusal
from muster.coordinator.ledger import Ledger
from muster.errors import MusterError
from muster.needs import ModelNeeds
from muster.placement import Placement, Refusal, alternatives, decide, error_of
from muster.protocol import Preview
from muster.replies import Option, Previewed, Refused
from muster.spec import Phase


def preview(ledger: Ledger, request: Preview, needs: ModelNeeds | None) -> Previewed | Refused:
    """What would be taken or why nothing is, then what else would do, then what would not; nothing is logged.

    Refused is only what cannot be asked for at all; what does not fit is told as an option that is none.
    """
    state, known = ledger.state, ledger.known()
    try:
        spec = intake.checked(request.spec, state)
    except MusterError as error:
        return refusal(error, Phase.PLACING)
    if not any(node.lost is None for node in state.nodes.values()):
        return _nowhere(ledger, request)
    weights = 0 if needs is not None else intake.weights_bytes(spec)
    first = decide(spec, state, known, needs, weights_bytes=weights)
    others = [_option(found) for _, found in alternatives(spec, state, known, needs, weights_bytes=weights)]
    options: dict[tuple[object, ...], Option] = {}
    for option in [_option(first), *sorted(others, key=lambda option: bool(option.refusal))]:
        options.setdefault(_key(option), option)
    remedies = first.remedies if isinstance(first, Refusal) else ()
    return Previewed(options=tuple(options.values()), needs=needs, remedies=remedies)


def _nowhere(ledger: Ledger, request: Preview) -> Refused:
    found = decide(request.spec, ledger.state)
    assert isinstance(found, Refusal), "there is no node"
    return refusal(error_of(found), Phase.PLACING)


def _option(found: Placement | Refusal) -> Option:
    if isinstance(found, Refusal):
        return Option(refusal=found.message)
    return Option(assignments=found.assignments, backend=found.backend, layout=found.layout)


def _key(option: Option) -> tuple[object, ...]:
    nodes = tuple(one.node for one in option.assignments)
    layout = option.layout
    return (option.refusal, option.backend, layout.jaccl_ring, layout.sharding, layout.split, nodes)
