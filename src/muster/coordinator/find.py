"""What every request needs: the instance that it names, and an answer where there is none."""

from __future__ import annotations

from muster.errors import MusterError, RequestError
from muster.replies import Refused
from muster.spec import Failure, InstanceId, Phase
from muster.state import Instance, State


def find(state: State, wanted: str) -> Instance:
    """The instance with this id or name, or with an id that begins so and no other does.

    Raises:
        RequestError: there is none, or more than one.
    """
    if wanted in state.instances:
        return state.instances[InstanceId(wanted)]
    named = [instance for instance in state.instances.values() if instance.spec.name == wanted]
    found = named or [instance for instance in state.instances.values() if wanted and instance.id.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(sorted(state.instances)) or "none"
    if found:
        several = ", ".join(sorted(instance.id for instance in found))
        raise RequestError(f"{wanted!r} may be any of {several}", remedy="Give more of the id.")
    raise RequestError(f"there is no instance {wanted!r}; the instances are: {known}", remedy="See: muster ps")


def refusal(error: MusterError, phase: Phase) -> Refused:
    """The error as an answer."""
    return Refused(
        failure=Failure(
            kind=error.kind, message=error.message, remedy=error.remedy, phase=phase, retryable=error.retryable
        )
    )
