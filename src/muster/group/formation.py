"""Forming the MLX group of this process. Runs in the runner (or in a user's script), once per process.

`mx.distributed.init` holds the GIL while it blocks and has no deadline: whoever started this process must
enforce one from outside, by a signal whose handler raises (MLX's `accept` then returns) or by killing it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from muster.errors import BackendError, FormationError
from muster.group.payload import Payload, RingPayload
from muster.group.scope import coordination_scope

if TYPE_CHECKING:
    import mlx.core as mx

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


class _Translation(msgspec.Struct, frozen=True):
    pattern: str
    cause: str
    remedy: str


#: First match wins. Source: `mlx/distributed/ring/ring.cpp`, `mlx/distributed/utils.cpp`,
#: `mlx/distributed/jaccl/lib/jaccl/rdma.cpp`; mlx issues 3162, 3207, 3467, 3777 and 4209.
_TRANSLATIONS: Final = (
    _Translation(
        r"Couldn't connect.*error: (110|111|113|60|61|65)\b",
        "the neighbour (or jaccl's rank 0) did not take the connection",
        "look at why that rank did not start, at firewalls, and for a stranger on its port",
    ),
    _Translation(
        r"Accept failed \(error: 4\)",
        "interrupted by a signal while waiting for the left neighbour",
        "look at why the left neighbour did not dial",
    ),
    _Translation(
        r"Couldn't (bind|listen).*error: (98|48)\b",
        "the port is taken by another process",
        "end that process, or start another attempt: it reserves other ports",
    ),
    _Translation(
        r"Couldn't (bind|listen).*error: (99|49)\b",
        "the rank's own address is not an address of this node (any more)",
        "restart the worker so that it reports its present addresses",
    ),
    _Translation(r"Couldn't (bind|listen).*error: (13|1)\b", "not permitted to listen", "use a port above 1023"),
    _Translation(
        r"Can't parse address|No usable addresses",
        "an address of the payload has no IPv4 address on this node",
        "use IPv4 addresses",
    ),
    _Translation(
        r"json|parse_error",
        "the coordination file could not be read",
        "see that nothing removes files from the scope's directory",
    ),
    _Translation(
        r"connection to a peer was lost|[Rr]ecv failed|[Ss]end failed",
        "a neighbour's process ended, or a stranger had taken its place",
        "look at that rank's log",
    ),
    _Translation(
        r"RTR failed with errno 22",
        "the RDMA device has no usable address: the Thunderbolt bridge is active or the port has no IPv4 address",
        "remove the interface from the Thunderbolt bridge and give it an IPv4 address of its own",
    ),
    _Translation(
        r"failed with errno 16\b",
        "the RDMA device is busy: its queue pairs are used up, or a crash left them behind",
        "reboot that node; trying again does not help",
    ),
    _Translation(
        r"failed with errno 60\b",
        "the RDMA connection timed out: it was routed over the wrong interface",
        "check which Thunderbolt port the device matrix names for this pair",
    ),
    _Translation(
        r"failed with errno 96\b",
        "the RDMA device lost its addresses, as after a long idle time",
        "unplug and replug the cable, or reboot that node",
    ),
    _Translation(
        r"allocate protection domain",
        "the RDMA device has no protection domain left",
        "reboot that node: too many groups were formed since it started",
    ),
    _Translation(
        r"valid mesh or a valid ring",
        "the device matrix is neither a mesh nor a ring",
        "check the Thunderbolt cables and `ibv_devices` on every node",
    ),
)

#: MLX keeps one group per backend and process and returns it again without reading the variables.
_formed: list[str] = []


def available_backends() -> tuple[str, ...]:
    """The backends that the installed MLX was built with; whether devices exist is another question."""
    import mlx.core as mx

    return tuple(name for name in BACKENDS if mx.distributed.is_available(name))


def form_group(payload: Payload, *, directory: Path, keep_scope: bool = False) -> FormedGroup:
    """Forms this process's group from `payload`. Blocks, holding the GIL, until every neighbour is there.

    Args:
        payload: This rank's view.
        directory: For the coordination file; see `coordination_scope`.
        keep_scope: Leave the file and the variables in place until `FormedGroup.close`.

    Raises:
        PayloadError: The payload breaks a rule; nothing was written.
        ScopeError: The coordination file cannot be put in place.
        BackendError: The installed MLX lacks the backend.
        FormationError: MLX failed, or gave a group of another rank or size, or this process has one already.
    """
    backend = _backend(payload)
    if backend not in available_backends():
        raise BackendError(f"this MLX has no {backend} backend", remedy=_backend_remedy(backend))
    if _formed:
        raise FormationError(
            f"this process has formed a group already, for {_formed[0]}", remedy="use one process per group"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(coordination_scope(payload, directory=directory))
        began = time.monotonic()
        group = _init(payload, backend)
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
def group_scope(payload: Payload, *, directory: Path) -> Generator[FormedGroup]:
    """`form_group` whose file and variables stay in place for the whole block, for a user's own script.

    A script that calls `mx.distributed.init` itself gets the group that was formed here.

    Raises:
        PayloadError, ScopeError, BackendError, FormationError: As `form_group`.
    """
    formed = form_group(payload, directory=directory, keep_scope=True)
    try:
        yield formed
    finally:
        formed.close()


def translate(text: str) -> tuple[str, str]:
    """Cause and remedy of an error text of MLX; the text itself and a hint when it is unknown."""
    for one in _TRANSLATIONS:
        if re.search(one.pattern, text, re.DOTALL):
            return one.cause, one.remedy
    return text, "look at the logs of the other ranks"


def _init(payload: Payload, backend: str) -> mx.distributed.Group:
    import mlx.core as mx

    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        # MLX keeps no group after a failure: a later call may succeed (seen with mlx 0.32.4).
        cause, remedy = translate(str(error))
        raise FormationError(
            f"rank {payload.rank} of {payload.world_size}: {cause}; MLX says: {error}", remedy=remedy
        ) from error
    _formed.append(f"attempt {payload.attempt} of {payload.instance}")
    return group


def _backend(payload: Payload) -> str:
    return "ring" if isinstance(payload, RingPayload) else "jaccl"


def _backend_remedy(backend: str) -> str:
    if backend == "jaccl":
        return "jaccl needs macOS 26.2 or newer, Thunderbolt 5 and RDMA enabled; use the ring elsewhere"
    return "install the mlx wheel for this platform"
