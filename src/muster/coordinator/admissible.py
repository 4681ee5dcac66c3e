"""Whether a request can be sent to a runner at all, seen before it is queued."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from muster.protocol import Generate
from muster.spec import Failure, Phase

#: Values in values: more than any template or schema needs, and less than any reader's stack.
MAX_DEPTH = 100

_encode = msgspec.msgpack.Encoder().encode


def fault_of(generate: Generate) -> Failure | None:
    """Why nobody can take the request, which is its own fault; `None` where it can be sent."""
    free = {"template": generate.template}
    free |= {f"tools[{number}]": tool.parameters for number, tool in enumerate(generate.tools)}
    for field, value in free.items():
        if _is_deep(value):
            return _fault(field, f"{field} has values within values more than {MAX_DEPTH} deep", "send flatter values")
    try:
        _encode(generate)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        return _fault("", f"the request holds a value that cannot be sent on: {error}", "use whole numbers below 2**63")
    return None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[Any, Any]", value).values())
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else []


def _fault(field: str, message: str, remedy: str) -> Failure:
    remedy = f"{remedy[0].upper()}{remedy[1:]}."
    return Failure(kind="request-invalid", message=message, remedy=remedy, phase=Phase.RUNNING, field=field)
