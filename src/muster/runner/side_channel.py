"""The ranks' exchange of connection data over the bus, in place of a TCP port of rank 0 (jaccl)."""

from __future__ import annotations

from collections.abc import Callable

from muster.errors import FormationError
from muster.group.formation import GatherFactory
from muster.rank_protocol import GatheredFrame, GatherFrame
from muster.runner.frames import Channel
from muster.spec import Failure


class SideChannelError(FormationError):
    """The ranks could not exchange their connection data over the bus; `failure` says why, and whose fault it is."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, remedy=failure.remedy)
        self.failure = failure


def bus_gather(channel: Channel) -> GatherFactory:
    """What `mx.distributed.init` takes as `all_gather_factory`: every exchange goes through this rank's worker.

    MLX calls it from `init`, one exchange after the other; the coordinator's deadline holds for each.

    Raises (the callable that it gives):
        SideChannelError: a rank did not take part in time.
        FormationError: what came does not fit.
    """

    def factory(rank: int, size: int) -> Callable[[bytes, int], bytes]:
        round_number = 0

        def gather(source: bytes, count: int) -> bytes:
            nonlocal round_number
            own = bytes(source[:count])
            channel.send(GatherFrame(round=round_number, data=own))
            frame = channel.receive()
            if not isinstance(frame, GatheredFrame):
                raise FormationError(f"the worker said {type(frame).__name__} when the other ranks' data were due")
            if frame.failure is not None:
                raise SideChannelError(frame.failure)
            if len(frame.parts) != size or any(len(part) != count for part in frame.parts) or frame.parts[rank] != own:
                raise FormationError(
                    f"exchange {round_number} brought {[len(part) for part in frame.parts]} bytes instead of {count} "
                    f"from each of {size} ranks",
                    remedy="use the same version of mlx on every node",
                )
            round_number += 1
            return b"".join(frame.parts)

        return gather

    return factory
