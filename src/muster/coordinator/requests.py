"""A request on its way through the coordinator, and the load that requests put on an instance."""

from __future__ import annotations

from collections.abc import Callable

from muster.protocol import Generate
from muster.replies import AnyPiece, Chunk, Done, Prefilled, Started
from muster.spec import InstanceId, ModelWorkload
from muster.state import Instance

#: Requests that an instance may have beyond its batch: they are encoded while others run. The rest waits here, where
#: it can still go to another instance.
AHEAD_REQUESTS = 8
#: An answer whose limit is higher is expected to end by itself long before it, in tokens.
_EXPECTED_ANSWER_TOKENS = 1024
#: After so long without any piece, beyond a step's own deadline, an answer that has begun is given up.
_SILENCE_SECONDS = 10.0
#: Characters of text per token of a prompt, before the runner has counted them.
_TOKEN_CHARACTERS = 4

Answerer = Callable[[AnyPiece], None]


class Load:
    """One attempt of an instance, and the requests that it was given."""

    def __init__(self, instance: Instance) -> None:
        workload = instance.spec.workload
        assert isinstance(workload, ModelWorkload)
        self.instance: InstanceId = instance.id
        self.attempt = instance.attempt
        self.identity = f"{instance.id}/{instance.attempt}".encode()  #: of the runner's DEALER
        self.limit = workload.max_batch + AHEAD_REQUESTS
        self.step_seconds = instance.spec.deadlines.step_seconds
        self.silence_seconds = self.step_seconds + _SILENCE_SECONDS
        self.requests: dict[int, Request] = {}  #: by the number that the runner knows them by
        self.outstanding_tokens = 0
        self.token_at = float("-inf")  #: when a token came last, on the monotonic clock
        self.retry_at = float("-inf")  #: the runner could not be reached; when to try again
        self.end_at = float("inf")  #: its instance was deleted; how long its last words may still take to arrive

    def add(self, number: int, request: Request, now: float) -> None:
        """The request was sent under `number`."""
        self.requests[number] = request
        self.outstanding_tokens += request.left_tokens
        request.number, request.load, request.heard_at = number, self, now

    def drop(self, request: Request) -> None:
        """The request is no longer this instance's."""
        del self.requests[request.number]
        self.outstanding_tokens -= request.left_tokens
        request.number, request.load = 0, None


class Request:
    """One generation that was asked for. It ends exactly once, with a `Done`, a `Refused`, or a cancellation."""

    def __init__(self, generate: Generate, model: str, order: int, now: float, answer: Answerer) -> None:
        self.generate = generate
        self.model = model  #: whose queue it waits in
        self.order = order  #: of arrival, which requests keep when they come back to the queue
        self.deadline = now + generate.wait_seconds  #: for the first token, on the monotonic clock
        self.answer = answer
        self.load: Load | None = None  #: where it runs; `None` while it waits, and after its end
        self.number = 0
        self.heard_at = now
        self.ended = False
        self.begun = False  #: it entered a batch
        self.answered = False  #: a token was passed on: nothing else can answer in its place any more
        self.passed_tokens = 0
        self.losses = 0  #: attempts that ended while they had it
        self.refused_by: frozenset[bytes] = frozenset()  #: the runners that could not take it
        self.left_tokens = _prompt_tokens(generate) + self._answer_tokens()
        self._prefilled = 0

    def take(self, reply: Started | Prefilled | Chunk, load: Load, now: float) -> None:
        """Pass a piece on, and see how much is left. What another instance said before is not said again."""
        self.heard_at = now
        match reply:
            case Chunk():
                count = len(reply.tokens)
                if count:
                    self.passed_tokens += count
                    load.token_at = now
                    if self.left_tokens > count:
                        self.left_tokens -= count
                        load.outstanding_tokens -= count
                elif not (reply.text or reply.reasoning or reply.tool_calls):
                    return
                self.answered = True
            case Started():
                self._expect(reply.prompt_tokens - reply.cached_tokens, load)
                if self.begun:
                    return
                self.begun = True
            case Prefilled():
                self._expect(reply.total - reply.done, load)
                if reply.done <= self._prefilled:
                    return
                self._prefilled = reply.done
        self.answer(reply)

    def has_hole(self, done: Done) -> bool:
        """Whether tokens were lost on the way, where the line was cut. The end token is counted and not passed on."""
        return done.completion_tokens - self.passed_tokens > 1

    def _expect(self, prompt_tokens: int, load: Load) -> None:
        left = max(0, prompt_tokens) + self._answer_tokens()
        load.outstanding_tokens += left - self.left_tokens
        self.left_tokens = left

    def _answer_tokens(self) -> int:
        return min(self.generate.sampling.max_tokens, _EXPECTED_ANSWER_TOKENS)


def _prompt_tokens(generate: Generate) -> int:
    """About how many tokens the prompt has."""
    if isinstance(generate.prompt, tuple):
        return len(generate.prompt)
    characters = len(generate.prompt or "")
    characters += sum(len(message.content) + len(message.reasoning) for message in generate.messages)
    return characters // _TOKEN_CHARACTERS + 1
