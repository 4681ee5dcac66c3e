"""The third vote: a small process that lets one coordinator at a time be the active one, and remembers which."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.abc
import msgspec
from loguru import logger

from muster.bus import ControlServer
from muster.coordinator.clock import lease_clock
from muster.coordinator.standing import write_durably
from muster.coordinator.voting import Grant, Voter, vote, woken
from muster.errors import LogError
from muster.filelock import FileLock
from muster.protocol import AnyRequest, Beat, CancelGenerate, Claim
from muster.replies import Answer, AnyReply, Refused, Vote
from muster.spec import Failure

_NAME = "votes.json"


class _Memory(msgspec.Struct, frozen=True):
    grants: dict[str, Grant] = {}


_decoder = msgspec.json.Decoder(_Memory)


class WitnessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a witness listens and keeps its votes. Port 0 takes a free one.

    A witness without a memory grants nothing for `quiet_seconds`: it may have granted a vote on another disk.
    """

    directory: Path
    host: str = "127.0.0.1"
    port: int = 0
    quiet_seconds: float = 5.0


class Witness:
    """Votes for one holder per epoch. `run` serves until it is cancelled."""

    def __init__(self, settings: WitnessSettings) -> None:
        self._settings = settings
        self._path = settings.directory / _NAME
        self._server = ControlServer(settings.host, settings.port)
        self._voter = Voter()

    async def run(self, *, task_status: anyio.abc.TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read the votes and serve; started with the port.

        Raises:
            LockError: another witness has the directory.
            LogError: the votes cannot be read or written.
            PortError: the port is taken, or the host is no address of this machine.
        """
        self._settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(
            self._settings.directory / "lock",
            what=f"the witness in {self._settings.directory}",
            remedy="Stop that one, or give this one another --directory.",
        )
        try:
            self._voter = self._remembered()
            async with self._server:
                task_status.started(self._server.port)
                async for incoming in self._server.incoming:
                    reply = self._answer(incoming.call.request)
                    if reply is not None:
                        self._server.send(incoming.identity, Answer(id=incoming.call.id, reply=reply))
        finally:
            lock.release()

    def _remembered(self) -> Voter:
        now = lease_clock()
        try:
            memory = _decoder.decode(self._path.read_bytes())
        except FileNotFoundError:
            self._keep(Voter())
            return Voter(quiet_until=now + self._settings.quiet_seconds)
        except (OSError, msgspec.DecodeError) as error:
            raise LogError(
                f"the votes in {self._path} cannot be read: {error}",
                remedy="Delete the file; the witness then grants nothing new for a lease.",
            ) from error
        return woken(memory.grants, now)

    def _keep(self, voter: Voter) -> None:
        write_durably(self._path, msgspec.json.encode(_Memory(grants=dict(voter.grants))))

    def _answer(self, request: AnyRequest) -> AnyReply | None:
        match request:
            case Claim():
                return self._vote(request)
            case Beat() | CancelGenerate():
                return None
            case _:
                failure = Failure(
                    kind="witness",
                    message="this is a witness: it votes between coordinators, and knows nothing of instances",
                    remedy="Give the address of a coordinator.",
                )
                return Refused(failure=failure)

    def _vote(self, claim: Claim) -> Vote | Refused:
        voter, answer = vote(self._voter, claim, lease_clock())
        before = self._voter.grants.get(claim.epoch)
        given = voter.grants.get(claim.epoch)
        if answer.granted and given is not None and not _same(before, given):
            try:
                self._keep(voter)
            except LogError as error:  # what would be forgotten is not granted
                logger.error("no vote is given: {}", error)
                failure = Failure(kind=error.kind, message=error.message, remedy=error.remedy, retryable=True)
                return Refused(failure=failure)
            logger.info("epoch {}: term {} is given to {}", claim.epoch, given.term, given.holder)
        self._voter = voter
        return answer


def _same(before: Grant | None, given: Grant) -> bool:
    """Whether a restart would remember the new one all the same: only the time is newer."""
    return before is not None and msgspec.structs.replace(given, until=before.until) == before
