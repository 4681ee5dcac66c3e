"""What a model needs, found out before it is placed: from files here, or by asking a node that has them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import anyio
import msgspec
from loguru import logger

from muster.bus.peer import ask
from muster.coordinator.knowledge import Knowledge
from muster.errors import MusterError
from muster.fetch.looks import Looks
from muster.fetch.survey import Survey
from muster.model.hub import is_offline
from muster.needs import ModelNeeds
from muster.peer_protocol import Inspected, InspectModel, PeerRefused
from muster.replies import Needs
from muster.spec import Failure, NodeId, NodeInfo, Phase, is_hub_id
from muster.state import State

#: Who has seen the model where it was no node.
HERE: Final = NodeId("")
#: How long a directory here may take; it may lie on a network share that hangs.
_HERE_SECONDS: Final = 3.0
#: How long nodes may take with files that they have.
_NODES_SECONDS: Final = 3.0
#: How long the hub may take: some models have hundreds of files, and each has a header.
_HUB_SECONDS: Final = 12.0
#: Nodes that are asked at once; those that say that they hold the model come first.
_ASKED: Final = 16
#: Models on nodes that a refusal names.
_OFFERED: Final = 8
#: Addresses of a node that are tried, and how long one may be silent before the next is tried beside it.
_ADDRESSES: Final = 4
_SILENT_SECONDS: Final = 0.5
#: Looks that may hang at one time, in this machine's files and at the hub; further ones wait for those to end.
_AT_ONCE: Final = 4

_Ask = Callable[[str, int, InspectModel, float], Awaitable[object]]


async def _ask_peer(host: str, port: int, request: InspectModel, seconds: float) -> object:
    return await ask(host, port, request, seconds=seconds)


class Inspection:
    """Remembers what it has found, as long as the files stay what they were. `survey` and `ask` are for tests."""

    def __init__(self, knowledge: Knowledge, *, survey: Survey | None = None, ask: _Ask = _ask_peer) -> None:
        self._knowledge = knowledge
        self._survey = survey or Survey(time.monotonic)
        self._ask = ask
        self._files, self._hub = Looks(_AT_ONCE), Looks(_AT_ONCE)

    async def needs(self, model: str, revision: str | None, state: State) -> Needs | Failure:
        """What the model needs, or why nobody knows. Never raises.

        In this order: files on this machine, for 3 s at most; nodes that may have it, all at once, for 3 s; for a hub
        id the hub, asked from here, then by a node, each for 12 s.
        """
        refusals: list[Failure] = []
        found = await self._try(self._files, lambda: self._survey.here(model, revision), _HERE_SECONDS, refusals)
        if found is not None:
            # What this machine happens to hold is the right size, but no reason for nodes to take an old commit.
            return Needs(needs=msgspec.structs.replace(found, commit=""), seen_by=HERE)
        nodes = self._nodes(model, state)
        request = InspectModel(model=model, revision=revision or "")
        if (seen := await self._ask_nodes(nodes, request, _NODES_SECONDS, refusals)) is not None:
            return seen
        if is_hub_id(model):
            if not is_offline():
                found = await self._try(self._hub, lambda: self._survey.hub(model, revision), _HUB_SECONDS, refusals)
                if found is not None:
                    return Needs(needs=found, seen_by=HERE)
            request = InspectModel(model=model, revision=revision or "", ask_hub=True)
            # Those that answered a moment ago are there; what one of them cannot reach, the next may.
            if not refusals or refusals[-1].retryable or is_offline():
                seen = await self._ask_nodes(nodes[:2], request, _HUB_SECONDS, refusals)
                if seen is not None:
                    return seen
        return _nobody(model, refusals, self._offered())

    async def weights_bytes(self, model: str) -> int:
        """Size of the model's weights where this machine has them, 0 where it does not know. Never raises."""
        try:
            return await self._files.find(lambda: _weights_bytes(model), model, seconds=_HERE_SECONDS)
        except MusterError:
            return 0

    def _offered(self) -> list[str]:
        """What nodes hold, by the names that it can be asked for by."""
        return sorted({held.model for facts in self._knowledge.facts.values() for held in facts.models})

    async def _try(
        self, looks: Looks, find: Callable[[], ModelNeeds | None], seconds: float, refusals: list[Failure]
    ) -> ModelNeeds | None:
        try:
            return await looks.find(find, "the model, seen from the coordinator's machine,", seconds=seconds)
        except MusterError as error:
            refusals.append(_failure(error.kind, error.message, remedy=error.remedy, retryable=error.retryable))
        except Exception as error:  # files of any kind may be in a model's directory: placement goes on without it
            logger.opt(exception=error).warning("a model could not be inspected")
            refusals.append(_failure("model-invalid", f"{type(error).__name__}: {error}"))
        return None

    def _nodes(self, model: str, state: State) -> list[NodeInfo]:
        """Nodes that can be asked, those that hold the model first."""
        infos = [node.info for node in state.nodes.values() if node.lost is None and node.info.peer_port]

        def holds(info: NodeInfo) -> bool:
            facts = self._knowledge.facts.get(info.node)
            return facts is not None and any(model in (held.model, held.path) for held in facts.models)

        return sorted(infos, key=lambda info: (not holds(info), info.node))[:_ASKED]

    async def _ask_nodes(
        self, nodes: list[NodeInfo], request: InspectModel, seconds: float, refusals: list[Failure]
    ) -> Needs | None:
        """The first good answer of those asked at once."""
        answers: list[Needs] = []

        async def ask_one(info: NodeInfo) -> None:
            reply = await self._ask_one(info, request, seconds)
            if isinstance(reply, Inspected):
                answers.append(Needs(needs=reply.needs, seen_by=info.node))
                group.cancel_scope.cancel()
            elif isinstance(reply, PeerRefused):
                refusals.append(reply.failure)

        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as group:
                for info in nodes:
                    group.start_soon(ask_one, info)
        return answers[0] if answers else None

    async def _ask_one(self, info: NodeInfo, request: InspectModel, seconds: float) -> object:
        """The node's reply, at the first of its addresses that answers; `None` where none does."""
        hosts = list(dict.fromkeys(address.host for address in (*info.addresses, *info.candidates)))[:_ADDRESSES]
        replies: list[object] = []

        async def ask_at(host: str, failed: anyio.Event) -> None:
            try:
                replies.append(await self._ask(host, info.peer_port, request, seconds))
                group.cancel_scope.cancel()
            except MusterError as error:
                logger.debug("node {} at {} was asked for {}: {}", info.node, host, request.model, error)
            failed.set()

        async with anyio.create_task_group() as group:
            for host in hosts:
                failed = anyio.Event()
                group.start_soon(ask_at, host, failed)
                with anyio.move_on_after(_SILENT_SECONDS):
                    await failed.wait()
        return replies[0] if replies else None


def _weights_bytes(model: str) -> int:
    try:
        return sum(path.stat().st_size for path in Path(model).expanduser().glob("*.safetensors"))
    except (OSError, RuntimeError, ValueError):  # unreadable, "~nobody", a NUL: the nodes will say more
        return 0


def _nobody(model: str, refusals: list[Failure], offered: list[str]) -> Failure:
    """The refusal that says most: of broken files, or of the hub, rather than that a name is not there."""
    telling = [one for one in refusals if "is no directory on this node" not in one.message]
    if telling:
        return telling[-1]
    if refusals:
        return _failure(
            "model-invalid",
            f"model {model!r} is on no node that could be asked, and is no hub id (owner/name)",
            remedy="Check the path, or give a hub id; a directory must be on a node that is to run it, or below the "
            f"--models of a worker. {_offer(offered)}",
        )
    return _failure(
        "model-unavailable",
        f"model {model!r} is not on the coordinator's machine, and there is no node to ask",
        remedy="Wait until a node has joined that holds it.",
        retryable=True,
    )


def _offer(offered: list[str]) -> str:
    if not offered:
        return "No node offers a model."
    more = f", and {len(offered) - _OFFERED} more" if len(offered) > _OFFERED else ""
    return f"Nodes offer: {', '.join(offered[:_OFFERED])}{more}."


def _failure(kind: str, message: str, *, remedy: str = "", retryable: bool = False) -> Failure:
    return Failure(kind=kind, message=message, remedy=remedy, retryable=retryable, phase=Phase.PLACING)
