"""Generations that clients of the control socket wait for."""

from __future__ import annotations

from typing import Protocol

from muster.coordinator.gateway import Gateway
from muster.coordinator.requests import Request
from muster.protocol import CancelGenerate, Generate
from muster.replies import AnyPiece, Done, Refused


class Answer(Protocol):
    """Sends a piece to whoever asked; `last`: none follows."""

    def __call__(self, reply: AnyPiece, *, last: bool) -> None: ...


class Generations:
    """What the gateway works on for the control socket, by connection and call, so that it can be cancelled."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._begun: dict[tuple[bytes, int], Request] = {}

    def take(self, identity: bytes, call: int, request: Generate | CancelGenerate, answer: Answer) -> None:
        """Ask the gateway, whose pieces `answer` gets; or end what this connection has asked for before."""
        if isinstance(request, CancelGenerate):
            begun = self._begun.pop((identity, request.id), None)
            if begun is not None:
                self._gateway.cancel(begun)
            return
        key = (identity, call)
        ended = False

        def pass_on(piece: AnyPiece) -> None:
            nonlocal ended
            ended = isinstance(piece, Done | Refused)
            if ended:
                self._begun.pop(key, None)
            answer(piece, last=ended)

        asked = self._gateway.ask(request, pass_on)
        if not ended:
            self._begun[key] = asked
