"""What an HTTP client is told when something cannot be done, before a dialect gives it its shape."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from muster.errors import MusterError
from muster.spec import Failure, Shortfall

#: Seconds that a client should wait before it asks a full queue, or a model that is coming up, again.
RETRY_SECONDS = 1

#: HTTP status of each kind of failure; any other is a 500, since the client did nothing wrong.
STATUS: dict[str, int] = {
    "request-invalid": 400,
    "context-exceeded": 400,
    "model-invalid": 400,
    "payload-invalid": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "model-unknown": 404,
    "instance-unknown": 404,
    "node-unknown": 404,
    "method-not-allowed": 405,
    "placement-refused": 409,
    "in-use": 409,
    "body-too-large": 413,
    "media-type-unsupported": 415,
    "queue-full": 429,
    "answer-lost": 502,
    "cancelled": 502,
    "model-unavailable": 503,
    "instance-deleted": 503,
    "log-unavailable": 503,
    "no-quorum": 503,
    "fenced": 503,
    "standby": 503,
    "stopping": 503,
    "wait-exceeded": 504,
}
_WITH_RETRY = frozenset({"queue-full", "model-unavailable", "stopping", "log-unavailable", "no-quorum", "standby"})


class ApiError(Exception):
    """A request that ends with an HTTP status. `field` names what of the body it is about: "messages[0].role".

    `shortfalls` is what each node was short of, where something was to be placed.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        field: str | None = None,
        status: int | None = None,
        retry_after_seconds: int | None = None,
        shortfalls: tuple[Shortfall, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.shortfalls = shortfalls
        self.status = STATUS.get(kind, 500) if status is None else status
        self.retry_after_seconds = retry_after_seconds
        if retry_after_seconds is None and kind in _WITH_RETRY:
            self.retry_after_seconds = RETRY_SECONDS


def invalid(message: str, field: str | None = None) -> ApiError:
    """A 400 about a field of the body."""
    return ApiError("request-invalid", message, field=field)


def unsupported(field: str, reason: str) -> ApiError:
    """A 400 for a field of the dialect that we know and cannot do. `reason` is a clause: "there is no …"."""
    return ApiError("request-invalid", f"{field} is not supported: {reason}", field=field)


def of_failure(failure: Failure, shortfalls: tuple[Shortfall, ...] = ()) -> ApiError:
    """The error that a client sees for a failure of the coordinator or of a runner."""
    message = (
        failure.message if failure.message.endswith((".", "!", "?")) or not failure.remedy else failure.message + "."
    )
    message = f"{message} {failure.remedy}".rstrip()
    return ApiError(failure.kind, message, field=failure.field or None, shortfalls=shortfalls)


def of_error(error: MusterError) -> ApiError:
    """The error that a client sees for one that was raised on purpose."""
    return of_failure(Failure(kind=error.kind, message=error.message, remedy=error.remedy, field=error.field))


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Generator[None]:
    """Give fields in errors the dialect's names: `names` has them by those of `Generate` and `SamplingParams`."""
    try:
        yield
    except ApiError as error:
        if error.field is not None:
            error.field = names.get(error.field, error.field)
        raise
