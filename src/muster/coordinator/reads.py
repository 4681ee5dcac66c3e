"""What a coordinator that follows another one answers: reads, what it is, and who else must be asked."""

from __future__ import annotations

import msgspec
import psutil

from muster import __version__
from muster.bus import Endpoint
from muster.coordinator import logbook
from muster.coordinator.find import refusal
from muster.coordinator.replica import Replica
from muster.errors import LogError, MusterError, StandbyError
from muster.eventlog.api import EventLog
from muster.lifecycle import Settings
from muster.protocol import AnyRequest, Beat, CancelGenerate, Get, Hello, Query, Replay, Who
from muster.replies import AnyReply, Role, Snapshot, Welcome
from muster.spec import BootId, Phase


class Reads:
    """Answers from a replica. `boot` changes with each log that it begins, so that observers begin again too."""

    def __init__(
        self, log: EventLog, replica: Replica, clocks: Settings, events_port: int, target: Endpoint | None, boot: BootId
    ) -> None:
        self._log = log
        self._replica = replica
        self._clocks = clocks
        self._events_port = events_port
        self._target = target
        self.boot = boot
        self.reason = ""  #: why it does not follow at the moment; "" while it does

    def answer(self, request: AnyRequest) -> AnyReply | None:
        """The reply; `None` for what is not answered."""
        try:
            match request:
                case Who():
                    return self.role()
                case Get():
                    return self._snapshot()
                case Query():
                    return logbook.search(self._log, request)
                case Replay():
                    return logbook.replay(self._log, request.after, self.boot) or self._welcome()
                case Hello(info=None):
                    return self._welcome()
                case Beat() | CancelGenerate():
                    return None
                case _:
                    return refusal(self._not_here(), Phase.PLACING)
        except MusterError as error:
            return refusal(error, Phase.PLACING)

    def role(self) -> Role:
        """What this coordinator is."""
        return Role(
            role="standby",
            epoch=self._log.epoch,
            term=self._replica.state.term,
            boot=self.boot,
            head=self._log.head,
            version=__version__,
            follows="" if self._target is None else self._target.url,
            reason=self.reason,
        )

    def _not_here(self) -> StandbyError:
        if self._target is None:
            return StandbyError(f"this coordinator is not active yet: {self.reason}", remedy="Ask again in a moment.")
        where = f"{self._target.host}:{self._target.port}"
        if self.reason:
            return StandbyError(
                f"this coordinator is a standby of {where}, and does not follow it at the moment: {self.reason}",
                remedy="If that one is gone for good, let this one take over: muster promote --coordinator ADDRESS",
            )
        return StandbyError(f"this coordinator is a standby of {where}", remedy=f"Ask the active one at {where}.")

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            state=self._state(), memory_bytes=psutil.Process().memory_info().rss, log_bytes=self._log.bytes_used
        )

    def _welcome(self) -> Welcome:
        if not self._log.head:
            raise LogError("this standby has nothing of the log yet", remedy="Ask the active coordinator.")
        return Welcome(
            epoch=self._log.epoch,
            coordinator_boot=self.boot,
            version=__version__,
            state=self._state(),
            events_port=self._events_port,
            generation_port=0,
            heartbeat_seconds=self._clocks.heartbeat_seconds,
            lease_seconds=self._clocks.lease_seconds,
            term=self._replica.state.term,
        )

    def _state(self) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(self._replica.state))
