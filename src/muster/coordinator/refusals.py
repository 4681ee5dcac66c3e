"""Why a request ends without an answer, or with half of one."""

from __future__ import annotations

import msgspec

from muster.coordinator.directory import why_over
from muster.coordinator.requests import Load, Request
from muster.errors import RequestError
from muster.replies import Done
from muster.spec import Failure, Phase
from muster.state import Broken, Deleting, Instance, State


def _failure(kind: str, message: str, remedy: str, *, retryable: bool = False) -> Failure:
    return Failure(kind=kind, message=message, remedy=remedy, phase=Phase.RUNNING, retryable=retryable)


def of_error(error: RequestError) -> Failure:
    """The request names no model."""
    return msgspec.structs.replace(_failure(error.kind, error.message, error.remedy), field=error.field)


def queue_full(model: str, waiting: int) -> Failure:
    """Nothing is taken before some of these have gone."""
    message = f"{waiting} requests wait for {model!r} already"
    return _failure("queue-full", message, "Try again in a moment.", retryable=True)


def unavailable(wanted: str, candidates: tuple[Instance, ...]) -> Failure:
    """None of the instances will ever answer."""
    return _failure("model-unavailable", why_over(wanted, candidates), "Create an instance of it: muster create")


def too_late(request: Request) -> Failure:
    """The time for the first token is over, or nothing came for long after it."""
    load = request.load
    if load is None:
        seconds = request.generate.wait_seconds
        message = f"no instance of {request.model!r} had room for the request within {seconds:g} s"
        return _failure("wait-exceeded", message, "Try again later, or wait longer.", retryable=True)
    if not request.answered:
        message = f"no token came from {load.instance} within {request.generate.wait_seconds:g} s"
        return _failure("wait-exceeded", message, f"See: muster describe {load.instance}", retryable=True)
    message = f"nothing more came from {load.instance} for {load.silence_seconds:g} s"
    remedy = f"Ask again; see whether its node still reaches this one: muster describe {load.instance}"
    return _failure("answer-lost", f"the answer broke off after its first token: {message}", remedy, retryable=True)


def internal(error: Exception) -> Failure:
    """An error of the coordinator's own."""
    message = f"the request cannot be handed to a runner: {type(error).__name__}: {error}"
    return _failure("internal", message, "See the coordinator's log, and report it.")


def lost(load: Load, state: State, *, answered: bool = True) -> Failure:
    """Why an answer that had begun does not go on, or why a request is not tried again."""
    when = "after the first token of this answer" if answered else "with this request, as others did before it"
    instance = state.instances.get(load.instance)
    if instance is None or isinstance(instance.status, Deleting):
        message = f"{load.instance} was deleted {when}"
        return _failure("instance-deleted", message, "Ask again, if another instance serves the model.")
    cause = instance.status.failure if isinstance(instance.status, Broken) else None
    if cause is None and instance.failures:
        cause = instance.failures[-1]
    reason = cause.sentence() if cause is not None else "its rank 0 stopped"
    message = f"{load.instance} failed {when}: {reason}"
    failure = _failure("answer-lost", message, "Ask again.", retryable=True)
    return failure if cause is None else msgspec.structs.replace(failure, rank=cause.rank, node=cause.node)


def hole(load: Load, request: Request, done: Done) -> Failure:
    """The answer ended, but not all of it has arrived."""
    missing = done.completion_tokens - request.passed_tokens
    message = f"{missing} of the answer's {done.completion_tokens} tokens were lost on the way from {load.instance}"
    remedy = f"Ask again; see whether its node's connection to this one breaks: muster describe {load.instance}"
    return _failure("answer-lost", message, remedy, retryable=True)
