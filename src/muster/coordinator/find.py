"""What every request needs: the instance that it names, and an answer where there is none."""

from __future__ import annotations

from muster.errors import MusterError, RequestError
from muster.replies import Refused
from muster.spec import Failure, InstanceId, ModelWorkload, Phase
from muster.state import Deleting, Ending, Instance, Running, State


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


def drain_seconds(instance: Instance) -> float:
    """How long the instance may finish what it has begun: only a model that is ready has begun anything."""
    serves = isinstance(instance.spec.workload, ModelWorkload) and isinstance(
        instance.status, Running | Deleting | Ending
    )
    return instance.spec.deadlines.drain_seconds if serves else 0.0


def refusal(error: MusterError, phase: Phase) -> Refused:
    """The error as an answer."""
    return Refused(
        failure=Failure(
            kind=error.kind, message=error.message, remedy=error.remedy, phase=phase, retryable=error.retryable
        )
    )
