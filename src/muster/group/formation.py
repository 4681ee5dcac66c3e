"""Forming the MLX group of this process. Runs in the runner (or in a user's script), once per process.

`mx.distributed.init` holds the GIL while it blocks and has no deadline: whoever started this process must
enforce one from outside, by a signal whose handler raises (MLX's `accept` then returns) or by killing it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.errors import BackendError, FormationError, PayloadError, RdmaError
from muster.group.payload import JacclPayload, Payload, RingPayload
from muster.group.remedies import explain, translate
from muster.group.scope import coordination_scope

if TYPE_CHECKING:
    import mlx.core as mx

#: Called with rank and size, gives what exchanges this rank's bytes, so many, for those of all, in rank order.
#: Source: `mx.distributed.init`, `all_gather_factory` (mlx ≥ 0.32.1).
GatherFactory = Callable[[int, int], Callable[[bytes, int], bytes]]

#: The backends that muster can write payloads for.
BACKENDS: Final = ("ring", "jaccl")


class FormedGroup:
    """The group of this process, checked for rank and size.

    Attributes:
        group: MLX's group, for collectives.
        seconds: How long `mx.distributed.init` took.
    """

    def __init__(
        self, payload: Payload, group: mx.distributed.Group, seconds: float, scope: contextlib.ExitStack
    ) -> None:
        self.group = group
        self.backend = _backend(payload)
        self.rank = payload.rank
        self.world_size = payload.world_size
        self.seconds = seconds
        self._scope = scope

    def close(self) -> None:
        """Ends the scope that `keep_scope` kept. MLX's group lives until the process ends."""
        self._scope.close()


#: MLX keeps one group per backend and process and returns it again without reading the variables.
_formed: list[str] = []


def available_backends() -> tuple[str, ...]:
    """The backends that the installed MLX was built with; whether devices exist is another question."""
    import mlx.core as mx

    return tuple(name for name in BACKENDS if mx.distributed.is_available(name))


def form_group(
    payload: Payload, *, directory: Path, keep_scope: bool = False, gather: GatherFactory | None = None
) -> FormedGroup:
    """Forms this process's group from `payload`. Blocks, holding the GIL, until every neighbour is there.

    Args:
        payload: This rank's view.
        directory: For the coordination file; see `coordination_scope`.
        keep_scope: Leave the file and the variables in place until `FormedGroup.close`.
        gather: How jaccl ranks exchange their connection data where the payload says that they use the bus.

    Raises:
        PayloadError: The payload breaks a rule, or wants the bus and there is no `gather`; nothing was written.
        ScopeError: The coordination file cannot be put in place.
        BackendError: The installed MLX lacks the backend.
        FormationError: MLX failed, or gave a group of another rank or size, or this process has one already.
        RdmaError: An RDMA device refused, and trying again does not help.
    """
    backend = _backend(payload)
    on_bus = isinstance(payload, JacclPayload) and payload.side_channel == "bus"
    if on_bus and gather is None:
        raise PayloadError("the payload wants the bus as side channel, and there is none", remedy='use "tcp"')
    if backend not in available_backends():
        raise BackendError(f"this MLX has no {backend} backend", remedy=_backend_remedy(backend))
    if _formed:
        raise FormationError(
            f"this process has formed a group already, for {_formed[0]}", remedy="use one process per group"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(coordination_scope(payload, directory=directory))
        began = time.monotonic()
        group = _init(payload, backend, gather if on_bus else None)
        seconds = time.monotonic() - began
        if (group.rank(), group.size()) != (payload.rank, payload.world_size):
            raise FormationError(
                f"rank {payload.rank}: MLX formed rank {group.rank()} of {group.size()} instead of rank "
                f"{payload.rank} of {payload.world_size}",
                remedy="use a fresh process for each group",
            )
        kept = stack.pop_all() if keep_scope else contextlib.ExitStack()
        return FormedGroup(payload, group, seconds, kept)


@contextlib.contextmanager
def group_scope(payload: Payload, *, directory: Path, gather: GatherFactory | None = None) -> Generator[FormedGroup]:
    """`form_group` whose file and variables stay in place for the whole block, for a user's own script.

    A script that calls `mx.distributed.init` itself gets the group that was formed here.

    Raises:
        PayloadError, ScopeError, BackendError, FormationError: As `form_group`.
    """
    formed = form_group(payload, directory=directory, keep_scope=True, gather=gather)
    try:
        yield formed
    finally:
        formed.close()


def _init(payload: Payload, backend: str, gather: GatherFactory | None) -> mx.distributed.Group:
    import mlx.core as mx

    try:
        if gather is None:
            group = mx.distributed.init(strict=True, backend=backend)
        else:
            group = mx.distributed.init(strict=True, backend=backend, all_gather_factory=gather)
    except (RuntimeError, ValueError) as error:
        # MLX keeps no group after a failure: a later call may succeed (seen with mlx 0.32.4).
        known = explain(str(error))
        cause, remedy = translate(str(error))
        kind = RdmaError if known is not None and known.lasting else FormationError
        raise kind(f"rank {payload.rank} of {payload.world_size}: {cause}; MLX says: {error}", remedy=remedy) from error
    _formed.append(f"attempt {payload.attempt} of {payload.instance}")
    return group


def _backend(payload: Payload) -> str:
    return "ring" if isinstance(payload, RingPayload) else "jaccl"


def _backend_remedy(backend: str) -> str:
    if backend == "jaccl":
        return "jaccl needs macOS 26.2 or newer, Thunderbolt 5 and RDMA enabled; use the ring elsewhere"
    return "install the mlx wheel for this platform"
