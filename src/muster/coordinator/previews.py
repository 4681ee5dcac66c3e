"""Where an instance would go, without creating it."""

from __future__ import annotations

from muster.coordinator.find import refusal
from muster.coordinator.ledger import Ledger
from muster.errors import MusterError
from muster.needs import ModelNeeds
from muster.placement import place
from muster.protocol import Preview
from muster.replies import Option, Previewed, Refused
from muster.spec import Phase


def preview(ledger: Ledger, request: Preview, needs: ModelNeeds | None) -> Previewed | Refused:
    """The ways to place what is asked about; nothing is logged."""
    try:
        placement = place(request.spec, ledger.state)
    except MusterError as error:
        return refusal(error, Phase.PLACING)
    option = Option(assignments=placement.assignments, backend=placement.backend)
    return Previewed(options=(option,), needs=needs)
