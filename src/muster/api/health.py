"""Whether the coordinator lives, and whether its models decode."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from muster import __version__
from muster.api.backend import Backend, Readiness
from muster.api.errors import ApiError
from muster.api.http import ApiRoute, Operation, Parameter, endpoint, json_response
from muster.api.own_errors import OwnDialect

#: How long a probe may take: an idle model decodes one token for it.
_PROBE_SECONDS = 10.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator lives."""

    status: str
    version: str


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Whether every model that was asked for decodes. `reason` says why there is none to ask for."""

    ready: bool
    models: tuple[Readiness, ...]
    reason: str = ""


def routes(backend: Backend) -> list[ApiRoute]:
    """`/health` needs no key; `/ready` asks all models, or those named by `model`."""
    dialect = OwnDialect()

    async def health(request: Request) -> Response:
        del request
        return json_response(Health(status="ok", version=__version__))

    async def ready(request: Request) -> Response:
        known = sorted(model.name for model in backend.models())
        asked = request.query_params.getlist("model")
        for name in asked:
            if name not in known:
                names = ", ".join(known) or "none"
                raise ApiError("model-unknown", f"there is no model {name!r}; the models are: {names}", field="model")
        found = await _probe(backend, asked or known)
        reason = "" if found else "no instance serves a model"
        answer = Ready(ready=bool(found) and all(one.ready for one in found), models=found, reason=reason)
        return json_response(answer, 200 if answer.ready else 503)

    return [
        ApiRoute(
            Operation(method="GET", path="/health", summary="Whether the coordinator lives.", reply=Health),
            endpoint(dialect, health, public=True),
        ),
        ApiRoute(
            Operation(
                method="GET",
                path="/ready",
                summary="Whether models decode; 503 with the reasons where one does not.",
                reply=Ready,
                parameters=(Parameter(name="model", summary="One model, by name; again for another. Absent: all."),),
            ),
            endpoint(dialect, ready),
        ),
    ]


async def _probe(backend: Backend, names: Sequence[str]) -> tuple[Readiness, ...]:
    late = f"it did not decode within {_PROBE_SECONDS:.0f} seconds"
    found = {name: Readiness(model=name, ready=False, reason=late) for name in names}

    async def one(name: str) -> None:
        with anyio.move_on_after(_PROBE_SECONDS):
            found[name] = await backend.probe(name)

    async with anyio.create_task_group() as group:
        for name in names:
            group.start_soon(one, name)
    return tuple(found[name] for name in names)
