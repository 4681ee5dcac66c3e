"""Options that say where an instance is to go and how, and how their text is read. Light: `--help` imports it."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import typer

from muster.errors import RequestError

#: A request that has to know the model first: nodes are asked, and perhaps the hub.
PLACING_SECONDS = 40.0
#: A group of one has nobody to talk to.
_GROUP_RANKS = 2

RanksOption = Annotated[
    str | None,
    typer.Option(
        help="Members of the group, or auto: as few as the model fits on. By default one per node of --nodes; without "
        "those auto for a model, 2 with --group, else 1.",
        metavar="N|auto",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Tokens of a sequence that room is kept for; by default 8192, or the model's own.",
        metavar="TOKENS",
        min=1,
    ),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", help="Sequences that room is kept for; by default 1.", metavar="N", min=1),
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split",
        help="Layers per rank of a pipeline, rank 0 (the last layers) first; by default by memory and speed.",
        metavar="N,N,…",
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Of a hub id: branch, tag or commit.", metavar="REVISION")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the tokenizer's own Python code run; a model's never does.")
]
NetworkOption = Annotated[
    str | None,
    typer.Option("--network", help="The only network that ranks use between machines, as 10.0.0.0/24.", metavar="CIDR"),
]
ShardingOption = Annotated[str, typer.Option("--sharding", help="auto, pipeline or tensor.", metavar="SHARDING")]
ServedNameOption = Annotated[
    str | None,
    typer.Option(
        "--served-name",
        help="What clients call the model; by default the hub id or the directory's name.",
        metavar="NAME",
    ),
]
MaxBatchOption = Annotated[
    int | None,
    typer.Option("--max-batch", help="Answers that a model writes at the same time; 32 by default.", metavar="N"),
]
PrefillChunkOption = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        help="Prompt tokens per step, which running answers wait for; 512 by default.",
        metavar="TOKENS",
    ),
]
PromptCacheOption = Annotated[
    float | None,
    typer.Option("--prompt-cache", help="GiB of finished prompts to keep per rank; 1 by default.", metavar="GIB"),
]
RestartOption = Annotated[
    str | None,
    typer.Option(
        "--restart",
        help="never, or on-failure[:N]. By default on-failure:5 for a model, else never.",
        metavar="POLICY",
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", help="A name to use instead of the id.")]
MemoryOption = Annotated[
    float | None,
    typer.Option("--memory", help="GiB that each rank needs; by default as predicted.", metavar="GIB"),
]
DeadlineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deadline",
        help="Limit of a phase (prepare, form, load, warm, step, drain, stop); again for more.",
        metavar="PHASE=SECONDS",
    ),
]


def parse_ranks(text: str | None) -> int | None:
    """Read "4"; `None` for "auto" and where nothing is given.

    Raises:
        RequestError: it is neither.
    """
    if text is None or text == "auto":
        return None
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 1024:
        return int(text)
    shown = text if text.isdigit() else repr(text)
    raise RequestError(f"--ranks is {shown}", remedy="Use auto, or a number from 1 to 1024.")


def choose_ranks(text: str | None, nodes: int, *, model: bool, group: bool) -> tuple[int, bool]:
    """How many ranks to ask for at least, and whether more may be taken.

    Raises:
        RequestError: "auto" where no model is asked for, or as `parse_ranks` does.
    """
    number = parse_ranks(text)
    if number is not None:
        return number, False
    if text == "auto" and not model:
        raise RequestError("--ranks is auto, and only a model's size says how many it takes", remedy="Give a number.")
    if nodes and text is None:
        return nodes, False
    return max(nodes, _GROUP_RANKS if group else 1), model


def parse_split(text: str | None) -> tuple[int, ...]:
    """Read "20,12".

    Raises:
        RequestError: one of them is no number above zero.
    """
    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise RequestError(f"--split is {text!r}", remedy="Give layers per rank, rank 0 first, as in --split 20,12.")
    return tuple(int(part) for part in parts)


def parse_network(text: str | None) -> str:
    """Read "10.0.0.0/24" or "10.0.0.7/24"; the former of both.

    Raises:
        RequestError: it is no IPv4 network.
    """
    if text is None:
        return ""
    try:
        return str(ipaddress.IPv4Network(text, strict=False))
    except ValueError as error:
        raise RequestError(
            f"--network is {text!r}: {error}", remedy="Give an IPv4 network as CIDR, as in --network 10.0.0.0/24."
        ) from error
