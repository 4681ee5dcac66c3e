"""Requests that are under way while something happens, and how they end for who asked, as `muster generate` asks."""

from __future__ import annotations

import threading

from cells import Answer
from kit import Client

from muster.bus import RefusedError
from muster.cli.asking import generation
from muster.errors import AnswerLostError, MusterError
from muster.protocol import Generate
from muster.replies import Chunk, Prefilled, Started


class Asked:
    """A generation that goes on beside the experiment. Its asker bears `silence_seconds` of silence."""

    def __init__(self, client: Client, request: Generate, silence_seconds: float) -> None:
        self.begun = threading.Event()  #: the first token is there
        self.words = ""  #: what its end says to a person
        self._client = client
        self._ended = threading.Event()
        self._answer = Answer.SILENCE
        client._portal.start_task_soon(self._ask, request, silence_seconds)

    async def _ask(self, request: Generate, silence_seconds: float) -> None:
        try:
            done = await generation(self._client._client, request, silence_seconds, self._take)
            self._answer, self.words = Answer.DONE, done.reason
        except RefusedError as error:
            self._answer, self.words = Answer.REFUSED, str(error)
        except AnswerLostError as error:
            self._answer, self.words = Answer.LOST, str(error)
        except MusterError as error:
            self._answer, self.words = Answer.UNREACHABLE, str(error)
        finally:
            self._ended.set()

    def _take(self, piece: Started | Prefilled | Chunk) -> None:
        if isinstance(piece, Chunk):
            self.begun.set()

    def wait(self, seconds: float) -> Answer:
        """How it ended."""
        return self._answer if self._ended.wait(seconds) else Answer.SILENCE
