"""One generation over the control socket, also over the end of the coordinator that was asked."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from muster.bus import ControlClient, RefusedError, Terms, seek
from muster.cli.errors import show_note
from muster.cli.reaching import knock
from muster.errors import AnswerLostError, MusterError, ProtocolError, UnreachableError
from muster.protocol import CancelGenerate, Generate, Who
from muster.replies import Answer, Chunk, Done, Prefilled, Refused, Role, Started

#: Between two looks whether the coordinator that was asked is still there.
_WATCH_SECONDS = 1.0
#: How long its answer may take before the connection is looked at. A machine that computes may be slow at all else.
_WHO_SECONDS = 1.0
#: How long to look for another active coordinator at the other addresses, before looking again at this one.
_SEEK_SECONDS = 2.0
#: How long a coordinator may be gone before a request that has no token yet is given up.
_RETURN_SECONDS = 60.0

Take = Callable[[Started | Prefilled | Chunk], None]


async def generation(client: ControlClient, request: Generate, silence_seconds: float, take: Take) -> Done:
    """Stream one generation: `take` gets every piece but the last, which is answered.

    A coordinator that is started again, or another that takes over, does not know the request: it is asked again, so
    that `take` may see the pieces before the first token twice.

    Raises:
        RefusedError: the coordinator or rank 0 refused it, or the instance ended meanwhile.
        UnreachableError: nothing came for so long, or the coordinator is gone and does not come back.
        AnswerLostError: the coordinator ended after the first token.
        ProtocolError: something else came.
    """
    watch = _Watch(client)

    def pass_on(piece: Started | Prefilled | Chunk) -> None:
        watch.begun = watch.begun or isinstance(piece, Chunk)
        take(piece)

    while True:
        done = await _attempt(client, request, silence_seconds, pass_on, watch)
        if done is not None:
            return done
        if watch.begun:
            raise AnswerLostError(f"{watch.lost}, and the rest of this answer is lost", remedy="Ask again.")
        show_note(f"{watch.lost}; asking again")


async def _attempt(
    client: ControlClient, request: Generate, silence_seconds: float, take: Take, watch: _Watch
) -> Done | None:
    """Ask once; `None` where the coordinator that was asked is gone: `watch.lost` says how."""
    done: Done | None = None
    failed: MusterError | None = None
    with anyio.move_on_after(silence_seconds):
        await watch.begin()
    async with anyio.create_task_group() as group:
        group.start_soon(watch.run, group.cancel_scope)
        try:
            done = await _stream(client, request, silence_seconds, take)
        except MusterError as error:
            failed = error  # raised outside, or the group would wrap it
        group.cancel_scope.cancel()
    failed = watch.error or failed
    if done is None and failed is not None and not watch.lost:
        raise failed
    return done


async def _stream(client: ControlClient, request: Generate, silence_seconds: float, take: Take) -> Done:
    stream = client.stream(request, timeout_seconds=silence_seconds)
    ended = False
    try:
        async with stream as replies:
            async for reply in replies:
                match reply:
                    case Started() | Prefilled() | Chunk():
                        take(reply)
                    case Done():
                        ended = True
                        return reply
                    case Refused(failure=failure):
                        ended = True
                        raise RefusedError(failure)
                    case _:
                        break
    finally:
        if not ended:  # nobody reads on: without this the ranks would go on to the last token
            client.send(CancelGenerate(id=stream.id))
    raise ProtocolError("the answer ended without an end", remedy="Use the same version of muster on both ends.")


class _Watch:
    """Sees whether the coordinator that was asked is still there, while its answer is awaited."""

    def __init__(self, client: ControlClient) -> None:
        self.begun = False  #: a token came
        self.lost = ""  #: what became of the coordinator; empty while all is well
        self.error: MusterError | None = None
        self._client = client
        self._terms = Terms()
        self._boot: str | None = None
        self._gone_since: float | None = None

    async def begin(self) -> None:
        """Ask who is there, just before the request: it goes the same way, and whoever gets that later is another."""
        self.lost, self._boot = "", None

        def hear(answer: Answer) -> None:
            if isinstance(answer.reply, Role):
                self._boot = answer.reply.boot
                self._terms.note(answer.reply.epoch, answer.reply.term)

        await self._client.submit(Who(), hear)

    async def run(self, scope: anyio.CancelScope) -> None:
        """Cancel `scope` once the coordinator that was asked can not answer any more."""
        while not self.lost and self.error is None:
            await anyio.sleep(_WATCH_SECONDS)
            try:
                role = await self._client.ask(Who(), _WHO_SECONDS, Role)
            except UnreachableError:
                await self._look()
            except MusterError as error:
                self.error = error
            else:
                self._gone_since = None
                if role.boot != self._boot:
                    self.lost = f"the coordinator at {self._client.endpoint} was started again"
                elif role.role != "active":
                    self.lost = f"the coordinator at {self._client.endpoint} is active no more ({role.role})"
        scope.cancel()

    async def _look(self) -> None:
        """It does not answer: has another taken over, is it gone, or only slow?"""
        here = self._client.endpoint
        if len(self._client.endpoints) > 1:
            found = await seek(self._client.endpoints, self._terms, _SEEK_SECONDS)
            if found not in (None, here):
                self.lost = f"the coordinator at {here} is gone, and the one at {found} took over"
                self._client.move(found)
                return
        try:
            await knock(here)
        except UnreachableError as error:
            if self.begun:
                self.lost = f"the coordinator at {here} is gone"
            elif self._gone_since is None:
                self._gone_since = time.monotonic()
                show_note("the coordinator does not answer; waiting for it")
            elif time.monotonic() - self._gone_since > _RETURN_SECONDS:
                self.error = error
        else:
            self._gone_since = None
