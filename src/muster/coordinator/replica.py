"""A log that is kept equal to the active coordinator's: what is missing is fetched, what differs is moved aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from loguru import logger

from muster.bus import ControlClient, RefusedError
from muster.coordinator import logbook
from muster.errors import ProtocolError
from muster.eventlog.api import EventLog, fold
from muster.events import Envelope, decode_envelope, encode_envelope
from muster.protocol import Replay
from muster.replies import Refused, Replayed, Welcome
from muster.state import State

#: How long one batch of events may take to come, in seconds.
_REPLAY_SECONDS = 5.0

_state_decoder = msgspec.msgpack.Decoder(State)


class Replica:
    """Owns nothing; `log` is written by nobody else.

    `on_event` gets each event once it is in the log. `on_replaced` hears that the log began again: whoever read it
    before has to begin again too.
    """

    def __init__(
        self,
        log: EventLog,
        on_event: Callable[[Envelope], None] = lambda envelope: None,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._on_event = on_event
        self._on_replaced = on_replaced
        self.state = log.load()

    async def catch_up(self, client: ControlClient, epoch: str) -> None:
        """Fetch everything up to the head of the coordinator's log, which is of this epoch.

        Raises:
            UnreachableError: it stopped answering; what came so far is kept.
            ProtocolError: it answered something else.
            LogError: the log cannot be written.
        """
        if self._log.epoch != epoch:
            self._replace(epoch, State(), f"it is of epoch {self._log.epoch}, and the active one's of {epoch}")
        while True:
            head = self._log.head
            own = self._log.read(head - 1, 1) if head else []
            reply = await client.call(Replay(after=head - len(own)), timeout_seconds=_REPLAY_SECONDS)
            match reply:
                case Replayed(envelopes=envelopes, head=other_head):
                    if own and (not envelopes or envelopes[0] != encode_envelope(own[0])):
                        self._replace(epoch, State(), f"its event {head} is not the active one's")
                        continue
                    self._take_encoded(envelopes[len(own) :])
                    if self._log.head >= other_head:
                        return
                    if self._log.head == head:
                        raise ProtocolError(f"nothing came after event {head}, although there are {other_head}")
                case Welcome():
                    self._begin_at(reply)
                case Refused(failure=failure):
                    raise RefusedError(failure)
                case _:
                    raise ProtocolError(f"a replay was answered with {type(reply).__name__}")

    def take(self, envelopes: Sequence[Envelope]) -> None:
        """Append events that follow; those that are in the log already are skipped.

        Raises:
            LogError: they cannot be stored, or do not follow.
        """
        new = [envelope for envelope in envelopes if envelope.sequence > self._log.head]
        if not new:
            return
        state = fold(self.state, new)
        self._log.append(new)
        self.state = state
        for envelope in new:
            self._on_event(envelope)

    def keep_house(self, now_ns: int) -> None:
        """Snapshot and prune where it is time, as the active one does by itself."""
        logbook.keep_house(self._log, self.state, now_ns)

    def _take_encoded(self, envelopes: Sequence[bytes]) -> None:
        try:
            decoded = [decode_envelope(encoded) for encoded in envelopes]
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(
                f"an event of the active coordinator cannot be read: {error}",
                remedy="Use the same version of muster on both.",
            ) from error
        self.take(decoded)

    def _begin_at(self, welcome: Welcome) -> None:
        """Go on from the state that came in the place of the events, which are gone, or were never there."""
        try:
            state = _state_decoder.decode(welcome.state)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(
                f"the state of the active coordinator (version {welcome.version}) cannot be read: {error}",
                remedy="Use the same version of muster on both.",
            ) from error
        head = self._log.head
        if state.sequence > head:
            self._replace(welcome.epoch, state, f"the active one no longer has the events after {head}")
        else:  # what it has instead may still be there from the first event on
            self._replace(welcome.epoch, State(), f"the active one never had its event {head}")

    def _replace(self, epoch: str, state: State, why: str) -> None:
        head = self._log.head
        kept = self._log.replace(epoch, state)
        self.state = state
        if head:
            logger.warning(
                "the event log of this coordinator, up to event {}, is replaced by the active one's, because {}; "
                "what was in it is kept in {}",
                head,
                why,
                kept or "nothing",
            )
        self._on_replaced()
