"""What a worker does for a rank of a jaccl group: rank 0's port, the payload, and the exchange over the bus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from muster.bus import ControlClient
from muster.errors import FencedError, MusterError, PayloadError, QuorumError, UnreachableError
from muster.group.addresses import WILDCARD
from muster.group.payload import JacclPayload, build_jaccl
from muster.group.remedies import explain_signal
from muster.protocol import Gather
from muster.rank_protocol import GatheredFrame, GatherFrame
from muster.replies import Gathered, Refused
from muster.spec import Failure, NodeAddress, NodeInfo, Phase
from muster.state import Connected, Loaded, Rank, Ready
from muster.worker.condition import Condition
from muster.worker.diagnosis import failure_of
from muster.worker.process import RunnerProcess
from muster.worker.watch import Place

#: A coordinator that is silent for so long may have been started again, and knows nothing of an exchange.
_ASK_AGAIN_SECONDS: Final = 2.0
#: Part of the deadline after which an exchange is refused: the reason, which names ranks, comes before the deadline.
_EXCHANGE_SHARE: Final = 0.9
#: Refusals that are about the coordinator and not about the exchange.
_NOT_NOW: Final = (FencedError.kind, QuorumError.kind)


def endpoints(place: Place, info: NodeInfo) -> tuple[NodeAddress, ...]:
    """Where a rank has to reserve a port: rank 0 for the side channel over TCP, and no other."""
    if place.rank != 0 or place.spec.side_channel == "bus":
        return ()
    given = place.spec.addresses[0][0] if place.spec.addresses and place.spec.addresses[0] else ""
    told = place.layout.ranks[0].coordinator if place.layout.ranks else ""
    host = given or told or info.addresses[0].host
    known = {address.host: address for address in (*info.candidates, *info.addresses)}
    unknown = NodeAddress(host=host, network="0.0.0.0/0" if host == WILDCARD else f"{host}/32")
    return (known.get(host, unknown),)


def payload(place: Place, ranks: Sequence[Rank]) -> JacclPayload:
    """The payload of a rank once rank 0 has its port.

    Raises:
        PayloadError: the attempt was placed without a device matrix, or with one of another size.
    """
    layout = place.layout
    devices = layout.devices or place.spec.devices
    if len(devices) != place.world_size:
        raise PayloadError(
            f"the attempt was placed with a device matrix of {len(devices)} rows for {place.world_size} ranks",
            remedy="let the coordinator place it again (muster retry), or give a matrix with a hostfile",
        )
    coordinators: list[str] = []
    if place.spec.side_channel == "tcp":
        lead = ranks[0].addresses[0]
        given = bool(place.spec.addresses and place.spec.addresses[0])
        for rank in range(place.world_size):
            told = layout.ranks[rank].coordinator if layout.ranks and not given and rank else ""
            coordinators.append(f"{told or lead.host}:{lead.port}")
    return build_jaccl(
        place.id,
        place.attempt,
        place.rank,
        devices,
        coordinators,
        prefer_ring=layout.jaccl_ring,
        side_channel=place.spec.side_channel,
    )


class Relay:
    """Carries a rank's exchanges to the coordinator. `due` is when the group has to be formed."""

    def __init__(self, place: Place, client: ControlClient) -> None:
        self.due = math.inf
        self.came = False  #: whether the rank's process has asked for an exchange
        self._place = place
        self._client = client
        self._before: Gather | None = None

    async def carry(self, frame: GatherFrame, runner: RunnerProcess) -> None:
        """Ask, and again where the coordinator was lost meanwhile; the runner gets the answer, whatever it is."""
        self.came = True
        place, until = self._place, self._until()
        request = Gather(
            instance=place.id,
            attempt=place.attempt,
            rank=place.rank,
            world_size=place.world_size,
            round=frame.round,
            data=frame.data,
        )
        answer: GatheredFrame | None = None
        while answer is None:
            answer = await self._ask(request, until - anyio.current_time())
        self._before = request
        await runner.send(answer)

    def _until(self) -> float:
        now = anyio.current_time()
        return now + min((self.due - now) * _EXCHANGE_SHARE, self._place.spec.deadlines.form_seconds)

    async def _ask(self, request: Gather, seconds: float) -> GatheredFrame | None:
        """The answer; `None` where there is time to ask again."""
        if seconds <= 0:
            return GatheredFrame(failure=_silent(self._place))
        asked = msgspec.structs.replace(request, seconds=seconds)
        try:
            reply = await self._client.call(asked, timeout_seconds=min(seconds + 1, _ASK_AGAIN_SECONDS))
        except UnreachableError:
            self._remind(seconds)
            return None
        except MusterError as error:  # too large, or no answer to it: the rank fails, and not its worker
            return GatheredFrame(failure=failure_of(error))
        match reply:
            case Gathered(parts=parts):
                return GatheredFrame(parts=parts)
            case Refused(failure=failure) if failure.kind in _NOT_NOW:
                await anyio.sleep(min(seconds, _ASK_AGAIN_SECONDS) / 4)
                self._remind(seconds)
                return None
            case Refused(failure=failure):
                return GatheredFrame(failure=failure)
            case _:
                return GatheredFrame(failure=_silent(self._place))

    def _remind(self, seconds: float) -> None:
        """Another coordinator may be there: a rank that is one exchange behind needs this one's part of that too."""
        if self._before is not None:
            self._client.send(msgspec.structs.replace(self._before, seconds=seconds))


def crashed(ended: Failure) -> Failure:
    """How a rank of a jaccl group ended, with what a crash inside JACCL means where that is what ended it."""
    known = explain_signal(-(ended.exit_code or 0), backend="jaccl")
    if known is None:
        return ended
    return msgspec.structs.replace(ended, message=f"{ended.message}: {known.cause}", remedy=known.remedy)


def not_formed(
    place: Place, ranks: Sequence[Rank], seconds: float, condition: Condition | None, *, came: bool = True
) -> Failure:
    """Why a jaccl group was not formed in time: this rank cannot go on, or others are late.

    `came`: whether its process has sent connection data, as far as that went over the bus.
    """
    if condition is not None and condition.hindered:
        message = f"the group was not formed within {seconds:g} s: {condition.text}"
        return Failure(kind="formation-timeout", message=message, remedy=condition.remedy, retryable=True)
    if not came and place.spec.side_channel == "bus":
        return Failure(
            kind="formation-timeout",
            message=f"the group was not formed within {seconds:g} s: this rank's process runs, and never sent its "
            "connection data",
            remedy="See its output: muster logs. A device that hangs is helped by a reboot of that node.",
            retryable=True,
        )
    late = [
        f"rank {rank.rank} on node {rank.node}"
        for rank in ranks
        if rank.rank != place.rank and not isinstance(rank.state, Connected | Loaded | Ready)
    ]
    lead = ranks[0]
    where = f" at port {lead.addresses[0].port} of {lead.addresses[0].host}" if lead.addresses else ""
    way = "the bus" if place.spec.side_channel == "bus" else f"rank 0 on node {lead.node}{where}"
    return Failure(
        kind="formation-timeout",
        message=f"the group was not formed within {seconds:g} s; this rank waits for {', '.join(late) or 'the others'} "
        f"to exchange connection data over {way}, or for RDMA to connect them",
        remedy="Check that every rank's process runs, that rank 0's port can be reached, and the Thunderbolt cables.",
        retryable=True,
        secondary=True,  # all ranks are late together: one that has seen a reason is believed first
    )


def _silent(place: Place) -> Failure:
    return Failure(
        kind="formation-timeout",
        message="the coordinator did not pass on the ranks' connection data in time",
        remedy="Look at the coordinator's log; or use --side-channel tcp.",
        phase=Phase.FORMING,
        rank=place.rank,
        retryable=True,
        secondary=True,
    )
