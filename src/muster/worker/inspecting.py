"""Answers what a model needs, from its files on this node, or from the hub where this node reaches it."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio.to_thread

from muster.bus.peer import PeerConnection
from muster.errors import ModelError
from muster.facts import HeldModel
from muster.fetch.survey import Survey
from muster.model.hub import absent
from muster.peer_protocol import Inspected, InspectModel


class Inspector:
    """Handler of `InspectModel` on the peer port. `held` gives the models that this node has now, from any thread."""

    def __init__(self, held: Callable[[], tuple[HeldModel, ...]], *, offline: bool = False) -> None:
        self._held = held
        self._offline = offline
        self._survey = Survey(time.monotonic)

    async def answer(self, request: InspectModel, connection: PeerConnection) -> Inspected:
        """What the model needs.

        Raises:
            FetchError: the hub was asked and cannot be reached; becomes `PeerRefused`, as all errors of muster's do.
            ModelError: the model is not here, its files are broken, or the hub refuses it.
        """
        del connection
        return await anyio.to_thread.run_sync(self._look, request, abandon_on_cancel=True)

    def _look(self, request: InspectModel) -> Inspected:
        revision = request.revision or None
        if request.ask_hub:
            if self._offline:
                raise ModelError("this node must not ask the hub", remedy="Start its worker without --offline.")
            return Inspected(needs=self._survey.hub(request.model, revision))
        held = self._held()
        found = self._survey.here(request.model, revision, held)
        if found is None:
            raise absent(request.model)
        return Inspected(needs=found, held=next((one for one in held if request.model in (one.model, one.path)), None))
