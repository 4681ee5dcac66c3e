"""What the serving benchmark measured, and the figures that it makes of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median, quantiles
from typing import Final, Literal

import msgspec

from muster.bench.report import (
    BESIDE,
    AtLeastTimesPeer,
    AtMost,
    AtMostTimesPeer,
    Bar,
    Figure,
    Round,
    ShareOfPeer,
    figure,
)
from muster.bench.shapes import SMALL, TINY, Shape

#: A part of the benchmark, as `--only` names it.
Part = Literal["throughput", "latency", "start", "idle", "soak", "prefix"]
PARTS: Final[tuple[Part, ...]] = ("throughput", "latency", "start", "idle", "soak", "prefix")

#: Who is measured: muster or a peer, on so many ranks.
Contender = Literal["muster 1", "muster 2", "server 1", "server 2", "launched 2", "in-process"]
#: What is measured of them.
Metric = Literal["streams", "stream", "first", "first of 8", "start", "idle", "first turn", "second turn"]

PEER_NAMES: Final[dict[Contender, str]] = {
    "server 1": "mlx_lm.server",
    "server 2": "mlx_lm.server, 2 plain processes",
    "launched 2": "mlx.launch -n 2 mlx_lm.server",
    "in-process": "mlx-lm in-process (stream_generate, BatchGenerator)",
}
#: The same in a word, for the names of figures.
SHORT_NAMES: Final[dict[Contender, str]] = {
    "server 1": "server",
    "server 2": "plain server",
    "launched 2": "mlx.launch",
    "in-process": "in-process",
}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value: tokens per second, seconds, or the share of a core."""

    contender: Contender
    shape: str
    metric: Metric
    round: int
    value: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. `worst` compares the 99th percentile of all values instead of the median of the rounds."""

    part: Part
    name: str
    unit: str
    metric: Metric
    shape: Shape
    muster: Contender
    peer: Contender
    bar: Bar | None = None
    worst: bool = False


def comparisons(parts: Collection[Part], shapes: Collection[Shape]) -> list[Comparison]:
    """The table of issue 3, for each model, as far as it stands beside a peer."""
    rows = [
        *(one for shape in (TINY, SMALL) for one in _speeds(shape)),
        *(one for shape in (TINY, SMALL) for one in _first_tokens(shape)),
        Comparison(
            part="start",
            name=f"create to first token over HTTP, 2 ranks{BESIDE}{SHORT_NAMES['server 2']}",
            unit="s",
            metric="start",
            shape=TINY,
            muster="muster 2",
            peer="server 2",
            bar=ShareOfPeer(divisor=4),
        ),
        Comparison(
            part="idle",
            name=f"CPU of an idle instance, all processes, 2 ranks{BESIDE}{SHORT_NAMES['server 2']}",
            unit="%",
            metric="idle",
            shape=TINY,
            muster="muster 2",
            peer="server 2",
            bar=ShareOfPeer(divisor=50),
        ),
    ]
    return [one for one in rows if one.part in parts and one.shape in shapes]


def _speeds(shape: Shape) -> list[Comparison]:
    def row(name: str, metric: Metric, muster: Contender, peer: Contender, factor: float | None) -> Comparison:
        return Comparison(
            part="throughput",
            name=f"{name}, {shape.what}{BESIDE}{SHORT_NAMES[peer]}",
            unit="tokens/s",
            metric=metric,
            shape=shape,
            muster=muster,
            peer=peer,
            bar=None if factor is None else AtLeastTimesPeer(factor=factor),
        )

    return [
        row("8 streams, 1 rank", "streams", "muster 1", "server 1", 1.3),
        row("8 streams, 1 rank", "streams", "muster 1", "in-process", None),
        row("8 streams, 2 ranks", "streams", "muster 2", "server 2", 1.2),
        row("8 streams, 2 ranks", "streams", "muster 2", "launched 2", 3.0),
        row("1 stream, 1 rank", "stream", "muster 1", "in-process", 0.9),
        row("1 stream, 1 rank", "stream", "muster 1", "server 1", None),
        row("1 stream, 2 ranks", "stream", "muster 2", "server 2", 1.2),
    ]


def _first_tokens(shape: Shape) -> list[Comparison]:
    def row(name: str, metric: Metric, muster: Contender, peer: Contender, *, worst: bool = False) -> Comparison:
        return Comparison(
            part="latency",
            name=f"{name}, {shape.what}{BESIDE}{SHORT_NAMES[peer]}",
            unit="s",
            metric=metric,
            shape=shape,
            muster=muster,
            peer=peer,
            bar=AtMostTimesPeer(factor=0.8),
            worst=worst,
        )

    return [
        row("first token, 1 rank", "first", "muster 1", "server 1"),
        row("first token, 2 ranks", "first", "muster 2", "server 2"),
        row("first token with 8, p99, 1 rank", "first of 8", "muster 1", "server 1", worst=True),
        row("first token with 8, p99, 2 ranks", "first of 8", "muster 2", "server 2", worst=True),
    ]


# --- figures ------------------------------------------------------------------------------------------------


def figures(samples: Sequence[Sample], parts: Collection[Part], shapes: Collection[Shape]) -> list[Figure]:
    """The rows of these parts."""
    rows = [
        figure(
            one.name,
            one.unit,
            _value(samples, one, one.muster),
            peer=_value(samples, one, one.peer),
            peer_name=PEER_NAMES[one.peer],
            bar=one.bar,
        )
        for one in comparisons(parts, shapes)
    ]
    return [*rows, _prefix(samples)] if "prefix" in parts else rows


def rounds(samples: Sequence[Sample], parts: Collection[Part], shapes: Collection[Shape]) -> list[Round]:
    """Each row of these parts, round by round; of a worst case, the worst of the round."""
    return [
        Round(
            name=one.name,
            number=number,
            unit=one.unit,
            muster=_value(_of_round(samples, number), one, one.muster),
            peer=_value(_of_round(samples, number), one, one.peer),
        )
        for one in comparisons(parts, shapes)
        for number in sorted({sample.round for sample in samples})
    ]


def _of_round(samples: Sequence[Sample], number: int) -> list[Sample]:
    return [sample for sample in samples if sample.round == number]


def _value(samples: Sequence[Sample], row: Comparison, contender: Contender) -> float | None:
    mine = [one for one in samples if (one.contender, one.shape, one.metric) == (contender, row.shape.name, row.metric)]
    return percentile([one.value for one in mine], 99) if row.worst else median_of_rounds(mine)


def median_of_rounds(samples: Sequence[Sample]) -> float | None:
    """The median of the rounds' medians; `None` where nothing was measured."""
    numbers = {one.round for one in samples}
    medians = [median(one.value for one in samples if one.round == number) for number in numbers]
    return median(medians) if medians else None


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The percentile of what was measured, never beyond the largest; `None` where nothing was."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _prefix(samples: Sequence[Sample]) -> Figure:
    """How much sooner the second turn of a long chat begins, and the same of the peer."""

    def ratio(contender: Contender) -> float | None:
        first, second = (
            median_of_rounds([one for one in samples if one.contender == contender and one.metric == metric])
            for metric in ("first turn", "second turn")
        )
        return second / first if first and second is not None else None

    return figure(
        f"second turn of a long chat: first token, share of the first turn's{BESIDE}{SHORT_NAMES['server 1']}",
        "",
        ratio("muster 1"),
        peer=ratio("server 1"),
        peer_name=PEER_NAMES["server 1"],
        bar=AtMost(limit=0.2, text="≤ 1/5"),
    )


def legend() -> str:
    """What stands behind the short names."""
    return "Beside " + "; ".join(f"{SHORT_NAMES[one]}: {PEER_NAMES[one]}" for one in PEER_NAMES) + "."
