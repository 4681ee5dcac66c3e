"""The clients of the soak: they ask a model without pause, by HTTP and by the control socket, and count what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import anyio

from muster.bench.churn_figures import SILENT, Outage, Outcomes, kind_of_error
from muster.bench.load import Ask, Target, ask
from muster.bench.shapes import prompt
from muster.bus import ControlClient
from muster.errors import MusterError
from muster.protocol import Generate
from muster.replies import Done, Refused
from muster.sampling import Message, SamplingParams

#: Nobody waits longer for an answer; who was told nothing by then is lost.
REQUEST_SECONDS = 60.0
#: The longest silence that a client of the control socket bears, and before it the longest wait for a first token.
_SILENCE_SECONDS, _WAIT_SECONDS = 20.0, 15.0
#: Within so long after it became ready, a model may still be at the requests that came before.
_QUEUED_SECONDS = 10.0
#: The kind of a request whose client left while the model was not ready.
STILL_WAITS = "still-waits"
_TOKENS = 24
_PAUSE_SECONDS = 0.05
#: After an error: who is told that nobody is there does not ask a thousand times a second.
_REST_SECONDS = 0.3


async def ask_by_http(
    target: Target,
    outcomes: Outcomes,
    outages: Sequence[Outage],
    numbers: Iterator[int],
    more: Callable[[], bool],
    ready_seconds: Callable[[], float],
) -> None:
    """Ask one thing after the other for as long as `more` says so.

    A request may wait in the queue longer than the client does: it is lost only where the model has been ready for a
    while, as `ready_seconds` tells; else it is one that still waits.
    """
    while more():
        request = Ask(messages=(("user", prompt(next(numbers))),), max_tokens=_TOKENS)
        began = time.monotonic()
        error: str | None = f"{SILENT}no end within {REQUEST_SECONDS:g} s by HTTP"
        with anyio.move_on_after(REQUEST_SECONDS):
            reading = await ask(target, request)
            error = kind_of_error(reading.error) if reading.error else None
        if error is not None and error.startswith(SILENT) and time.monotonic() - began >= REQUEST_SECONDS:
            seconds = ready_seconds()
            error = STILL_WAITS if seconds < _QUEUED_SECONDS else f"{error}, with the model ready for {seconds:.0f} s"
        outcomes.add(error, began, time.monotonic(), outages)
        await anyio.sleep(_PAUSE_SECONDS if error is None else _REST_SECONDS)


async def ask_by_control(
    address: str,
    model: str,
    outcomes: Outcomes,
    outages: Sequence[Outage],
    numbers: Iterator[int],
    more: Callable[[], bool],
) -> None:
    """Ask one thing after the other for as long as `more` says so."""
    async with ControlClient(address) as client:
        while more():
            began = time.monotonic()
            error = await ask_once(client, model, prompt(next(numbers)))
            outcomes.add(error, began, time.monotonic(), outages)
            await anyio.sleep(_PAUSE_SECONDS if error is None else _REST_SECONDS)


async def ask_once(client: ControlClient, instance: str, text: str) -> str | None:
    """One request by the control socket; the kind of its error, if it has one."""
    request = Generate(
        instance=instance,
        messages=(Message(role="user", content=text),),
        sampling=SamplingParams(max_tokens=_TOKENS),
        wait_seconds=_WAIT_SECONDS,
    )
    try:
        with anyio.fail_after(REQUEST_SECONDS):
            async with client.stream(request, timeout_seconds=_SILENCE_SECONDS) as replies:
                async for reply in replies:
                    match reply:
                        case Done():
                            return None
                        case Refused(failure=failure):
                            return failure.kind
                        case _:
                            pass
    except MusterError as error:
        return f"{SILENT}{error.message}"
    except TimeoutError:
        pass
    return f"{SILENT}no end within {REQUEST_SECONDS:g} s by the control socket"
