"""Answers what a model needs, from its files on this node, or from the hub where this node reaches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from muster.bus.peer import PeerConnection
from muster.errors import ModelError
from muster.facts import HeldModel
from muster.fetch.looks import LOOK_SECONDS, Looks
from muster.fetch.survey import Survey
from muster.model.hub import absent
from muster.peer_protocol import Inspected, InspectModel

#: How long the hub may take: it is asked for a list, an index and headers.
_HUB_SECONDS: Final = 60.0
_AT_ONCE: Final = 32


class Inspector:
    """Handler of `InspectModel` on the peer port. `held` gives the models that this node has now, from any thread."""

    def __init__(self, held: Callable[[], tuple[HeldModel, ...]], *, offline: bool = False) -> None:
        self._held = held
        self._offline = offline
        self._survey = Survey(time.monotonic)
        # Apart: a share that hangs keeps nobody from the hub, and the other way round.
        self._looks, self._hub_looks = Looks(_AT_ONCE), Looks(_AT_ONCE)

    async def answer(self, request: InspectModel, connection: PeerConnection) -> Inspected:
        """What the model needs.

        Raises:
            FetchError: the hub was asked and cannot be reached, or this node's files cannot be read in time; becomes
                `PeerRefused`, as all errors of muster's do.
            ModelError: the model is not here, its files are broken, or the hub refuses it.
        """
        looks, seconds = (self._hub_looks, _HUB_SECONDS) if request.ask_hub else (self._looks, LOOK_SECONDS)
        what = f"model {request.model!r}"
        return await looks.find(lambda: self._looked(request), what, seconds=seconds, asker=connection)

    def _looked(self, request: InspectModel) -> Inspected:
        try:
            return self._look(request)
        except (OSError, ValueError, RuntimeError) as error:  # "~nobody", a name that is too long, or no name at all
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise ModelError(
                f"model {request.model!r} cannot be looked at: {reason}", remedy="give a directory or a hub id"
            ) from error

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
