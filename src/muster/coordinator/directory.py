"""Which instances a request may go to: by the name of a served model, or the name or id of one instance."""

from __future__ import annotations

from enum import Enum

from muster.coordinator.find import find
from muster.errors import RequestError, UnknownModelError
from muster.spec import ModelWorkload
from muster.state import Broken, Deleting, Ending, Finished, Instance, Ready, Running, Starting, State


class Standing(Enum):
    """What a request may expect of an instance."""

    READY = "ready"  #: every rank waits for work
    COMING = "coming"  #: an attempt is under way, or will be
    OVER = "over"  #: it failed for good, or is being deleted


def standing_of(instance: Instance) -> Standing:
    """What a request may expect of the instance now."""
    match instance.status:
        case Running():
            # Between a rank's end and the verdict on the attempt there is nobody to answer.
            up = all(isinstance(rank.state, Ready) for rank in instance.ranks)
            return Standing.READY if up else Standing.COMING
        case Starting() | Ending() | Broken(retry_at_ns=int()):
            return Standing.COMING
        case Broken() | Finished() | Deleting():
            return Standing.OVER


class Directory:
    """The models of one state, by the names that clients know them by."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._served: dict[str, tuple[Instance, ...]] = {}
        for instance in state.instances.values():
            if isinstance(instance.spec.workload, ModelWorkload):
                name = instance.spec.workload.public_name
                self._served[name] = (*self._served.get(name, ()), instance)

    def served(self) -> dict[str, tuple[Instance, ...]]:
        """Every model that an instance serves or will serve, with those instances, by name."""
        living = {
            name: tuple(instance for instance in instances if standing_of(instance) is not Standing.OVER)
            for name, instances in self._served.items()
        }
        return {name: living[name] for name in sorted(living) if living[name]}

    def candidates(self, wanted: str) -> tuple[Instance, ...]:
        """All instances of the served model of that name; else the one model instance of that name or id.

        Raises:
            UnknownModelError: there is none; the message lists the models that there are.
            RequestError: it is the name of something that is no model, or may be any of several.
        """
        served = self._served.get(wanted)
        if served is not None:
            return served
        try:
            instance = find(self.state, wanted)
        except RequestError as error:
            if any(wanted and name.startswith(wanted) for name in self.state.instances):
                raise  # it may be any of several
            known = ", ".join(self.served()) or "none"
            raise UnknownModelError(
                f"there is no model {wanted!r}; the models are: {known}",
                remedy="Ask one of these, or create an instance of it: muster create",
                field="model",
            ) from error
        if not isinstance(instance.spec.workload, ModelWorkload):
            raise RequestError(
                f"{instance.id} is no model", remedy="Ask an instance that serves one: muster ps", field="model"
            )
        return (instance,)


def why_over(wanted: str, instances: tuple[Instance, ...]) -> str:
    """The cause, for somebody whose request none of these will ever answer."""
    causes: list[str] = []
    for instance in instances:
        match instance.status:
            case Broken(failure=failure):
                causes.append(f"{instance.id} failed: {failure.sentence()}")
            case Deleting():
                causes.append(f"{instance.id} is being deleted")
            case _:
                causes.append(f"{instance.id} is over")
    return f"no instance of {wanted!r} is left that could become ready: " + "; ".join(causes or ["it was deleted"])
