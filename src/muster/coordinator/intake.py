"""Requests of clients: checked, placed, and turned into events or into a reason."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import msgspec

from muster.coordinator import operations
from muster.coordinator.find import find, refusal
from muster.coordinator.ledger import Ledger
from muster.errors import MusterError, RequestError
from muster.events import InstanceCreated, InstanceDeleting
from muster.group.scope import owned
from muster.needs import ModelNeeds
from muster.placement import Placement, Refusal, error_of
from muster.protocol import Create, Delete, Drain, Resume, Retry
from muster.replies import Accepted, Created, Noted, Refused
from muster.spec import (
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    Phase,
    ScriptWorkload,
)
from muster.state import Deleting, State, drain_seconds

Change = Delete | Drain | Resume | Retry


def change(ledger: Ledger, request: Change) -> Accepted | Noted | Refused:
    """Carry out a client's wish, or say why not.

    Raises:
        LogError: the log cannot be written; nothing has happened.
    """
    match request:
        case Delete():
            return delete(ledger, request)
        case Drain() | Resume():
            return operations.oversee(ledger, request)
        case Retry():
            return operations.retry(ledger, request)


def find_created(state: State, key: str) -> Created | None:
    """The instance that was created under the key, if there is one."""
    for known in state.instances.values():
        if key and known.key == key:
            return Created(instance=known.id, sequence=known.created_by)
    return None


def refused(ledger: Ledger, request: Create) -> Created | Refused | None:
    """What answers the request before it is placed: the instance of the same key, or what is wrong with it."""
    if (known := find_created(ledger.state, request.key)) is not None:
        return known
    try:
        checked(request.spec, ledger.state)
    except MusterError as error:
        return refusal(error, Phase.PLACING)
    return None


def create(
    ledger: Ledger, request: Create, placement: Placement | Refusal, needs: ModelNeeds | None = None
) -> Created | Refused:
    """Accept an instance where it was placed, or say why not. The same key gives the same instance again.

    `placement` was found for the ledger's state as it is now; `needs` is what is known of the model.

    Raises:
        LogError: the log cannot be written; nothing has happened.
    """
    if (answer := refused(ledger, request)) is not None:
        return answer
    if isinstance(placement, Refusal):
        return unplaced(placement)
    spec = request.spec
    spec = msgspec.structs.replace(spec, ranks=len(placement.assignments))
    if needs is None:  # the estimate is all that there is; else the layout says it for each rank
        spec = msgspec.structs.replace(spec, memory_bytes=placement.layout.ranks[0].memory_bytes)
    instance = InstanceId(f"{_stem(spec)}-{secrets.token_hex(3)}")
    envelope = ledger.commit(
        InstanceCreated(
            instance=instance,
            attempt=1,
            spec=spec,
            assignments=placement.assignments,
            backend=placement.backend,
            key=request.key,
            layout=placement.layout,
            needs=needs,
        )
    )
    return Created(instance=instance, sequence=envelope.sequence)


def unplaced(found: Refusal) -> Refused:
    """The refusal of a placement as an answer."""
    answer = refusal(error_of(found), Phase.PLACING)
    return msgspec.structs.replace(answer, shortfalls=found.shortfalls)


def delete(ledger: Ledger, request: Delete) -> Accepted | Refused:
    """Begin to delete an instance, or hurry its deletion; it is gone when its ranks are.

    Raises:
        LogError: the log cannot be written; nothing has happened.
    """
    try:
        instance = find(ledger.state, request.instance)
    except RequestError as error:
        return refusal(error, Phase.STOPPING)
    seconds = 0.0 if request.now else drain_seconds(instance)
    if isinstance(instance.status, Deleting) and instance.status.drain_seconds <= seconds:
        return Accepted(instance=instance.id, sequence=ledger.state.sequence)
    envelope = ledger.commit(
        InstanceDeleting(instance=instance.id, attempt=instance.attempt, reason="asked for", drain_seconds=seconds)
    )
    return Accepted(instance=instance.id, sequence=envelope.sequence)


def checked(spec: InstanceSpec, state: State) -> InstanceSpec:
    """The spec, where nothing is wrong with it by itself.

    Raises:
        RequestError: it names something taken, or its workload cannot be.
    """
    if spec.name is not None and spec.name in state.instances:
        raise RequestError(f"the name {spec.name!r} is the id of an instance", remedy="Choose another name.")
    if spec.name is not None:
        taken = [instance.id for instance in state.instances.values() if instance.spec.name == spec.name]
        if taken:
            raise RequestError(
                f"the name {spec.name!r} is that of instance {taken[0]}",
                remedy="Choose another name, or delete that instance.",
            )
    match spec.workload:
        case ModelWorkload(model=model):
            if not model.strip():
                raise RequestError("the model is empty", remedy="Give a directory or a hub id.")
        case ScriptWorkload(path=path, directory=directory):
            if not path:
                raise RequestError("the script's path is empty", remedy="Give a Python file.")
            if directory is None and not Path(path).is_absolute():
                raise RequestError(
                    f"the script's path {path!r} is relative and there is no directory for it",
                    remedy="Give an absolute path, or a directory.",
                )
        case GroupWorkload():
            pass
    _check_environment(spec.environment)
    return spec


def _check_environment(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        if not name or "=" in name or "\0" in name + value:
            raise RequestError(
                f"environment has {name!r}", remedy="A name must not be empty or hold '=', and nothing a NUL."
            )
        if owned(name):
            raise RequestError(
                f"environment sets {name}, which muster sets itself for each rank",
                remedy="Leave it out; devices and addresses are given in the fields of those names.",
            )


def _stem(spec: InstanceSpec) -> str:
    """What an instance's id begins with: its name, its model's or script's, or "group"."""
    match spec.workload:
        case ModelWorkload(model=model):
            text = Path(model).name
        case ScriptWorkload(path=path):
            text = Path(path).stem
        case GroupWorkload():
            text = "group"
    return re.sub(r"[^a-z0-9]+", "-", (spec.name or text).lower()).strip("-")[:32] or "instance"
