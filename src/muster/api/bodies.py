"""Request bodies: bounded in size, decoded by msgspec, and refused with the name of the field that is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, TypeVar, cast

import anyio
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope

from muster.api.errors import ApiError, invalid, unsupported
from muster.sampling import SamplingParams

#: The largest body that is read, in bytes.
MAX_BODY_BYTES = 10_000_000
#: So much of a body that is too large is thrown away before it is refused: a client that writes on reads no answer.
_DISCARD_BYTES = 8 * MAX_BODY_BYTES
_BODY = "muster.body"
_HUGE = 2**64

T = TypeVar("T")

_AT = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`")


class ClientLeftError(Exception):
    """The client went away while its request was being read."""


#: A client that falls silent within its body does not hold what it has sent for longer.
_BODY_SECONDS: Final = 30.0


async def receive_body(scope: Scope, receive: Receive) -> None:
    """Read the whole body, for `body_of` and `read_body`.

    Raises:
        ApiError: 413, the body is larger than `MAX_BODY_BYTES`, whether it says so or not; 408, it does not come.
        ClientLeftError: the client went away.
    """
    headers = dict(cast("list[tuple[bytes, bytes]]", scope["headers"]))
    declared = headers.get(b"content-length", b"")
    expected = int(declared) if declared.isdigit() else 0
    # A client that asks first has not sent anything yet: it hears the answer at once.
    if expected > _DISCARD_BYTES or (expected > MAX_BODY_BYTES and b"expect" in headers):
        raise too_large(expected)
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        try:
            with anyio.fail_after(_BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            message = f"nothing more of the body came for {_BODY_SECONDS:g} s"
            raise ApiError("body-too-slow", message, status=408) from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
            if size > _DISCARD_BYTES:
                break
    if size > MAX_BODY_BYTES:
        raise too_large(size)
    scope[_BODY] = b"".join(chunks)


def too_large(size: int) -> ApiError:
    """The 413 for a body of so many bytes or more."""
    return ApiError(
        "body-too-large", f"the body has {size} bytes or more; at most {MAX_BODY_BYTES} are read. Send a shorter one."
    )


def body_of(request: Request) -> bytes:
    """The body as it came."""
    return cast("bytes", request.scope[_BODY])


async def read_body(request: Request, kind: type[T]) -> T:
    """The body as a `kind`, whose Structs should forbid unknown fields.

    Raises:
        ApiError: 400, the body is no JSON, or a field is missing, unknown, or of the wrong type; `field` names it.
    """
    return decode(body_of(request), kind)


def decode(body: bytes, kind: type[T]) -> T:
    """`read_body` of these bytes."""
    if not body.strip():
        raise invalid("the body is empty; it must be a JSON object")
    try:
        return cast("T", _decoder(kind).decode(body))
    except msgspec.ValidationError as error:
        raise of_validation(str(error)) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def of_validation(text: str) -> ApiError:
    """The 400 for what msgspec says of a value: path and name are taken out of its sentence."""
    place = _AT.search(text)
    path = place["path"].lstrip(".") if place is not None else ""
    sentence = text[: place.start()] if place is not None else text
    named = _UNKNOWN.match(text) or _MISSING.match(text)
    if named is not None:
        path = f"{path}.{named['name']}" if path else named["name"]
    if _UNKNOWN.match(text):
        return invalid(f"{path} is not a field that is known here", path)
    if _MISSING.match(text):
        return invalid(f"{path} is missing", path)
    sentence = sentence[:1].lower() + sentence[1:] if sentence.startswith(("Expected", "Invalid")) else sentence
    what = "a key of " if place is not None and place["key"] else ""
    return invalid(f"{what}{path}: {sentence}" if path else f"the body: {sentence}", path or None)


class Limit(msgspec.Struct, frozen=True):
    """Why a field of a dialect is refused, unless it is null or one of the values that change nothing."""

    reason: str
    neutral: tuple[object, ...] = ()


def refuse(body: msgspec.Struct, limits: Mapping[str, Limit], within: str = "") -> None:
    """Refuse what a body, or the part of it at the path `within`, asks for and muster cannot do.

    Raises:
        ApiError: 400 with the field's name and the reason.
    """
    for name, limit in limits.items():
        value = getattr(body, name)
        if value is not None and not any(value == same for same in limit.neutral):
            raise unsupported(f"{within}.{name}" if within else name, limit.reason)


def sampling_params(values: dict[str, Any], names: dict[str, str] | None = None) -> SamplingParams:
    """Sampling parameters of a request. `names` gives the dialect's name of a field where it differs.

    A value of `None` means that the dialect's field was not given.

    Raises:
        ApiError: 400, a value is out of range.
    """
    own = names or {}
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        # Further arithmetic would not even hold it.
        if isinstance(value, int) and abs(value) >= _HUGE:
            field = own.get(name, name)
            raise invalid(f"{field} is an integer of more than 64 bits", field)
    try:
        return SamplingParams(**given)
    except ValueError as error:
        text = str(error)
        found = re.match(r"\w+", text)
        field = found[0] if found is not None else ""
        known = own.get(field, field)
        raise invalid(known + text[len(field) :], known) from None
