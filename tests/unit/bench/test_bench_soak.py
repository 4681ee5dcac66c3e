"""What the soak counts as an error, and as a leak."""

from __future__ import annotations

from muster.bench.load import Ask, Reading
from muster.bench.soak import Soak, Tally, Weight, count, roles_of, soak_figures

REQUEST = Ask(messages=(("user", "x"),), max_tokens=8)
SOAK = Soak(streams=200, seconds=120.0)


def reading(*, tokens: int = 8, error: str = "", left: bool = False) -> Reading:
    return Reading(
        error=error,
        text="",
        tokens=tokens,
        cached_tokens=0,
        began_seconds=0,
        first_seconds=0,
        last_seconds=1,
        left=left,
    )


def weights(megabytes: float, descriptors: int) -> dict[str, Weight]:
    return {"coordinator": Weight(memory_bytes=int(megabytes * 1e6), descriptors=descriptors)}


def test_an_answer_counts_once_as_what_it_is() -> None:
    tally = Tally()
    for one in (reading(), reading(left=True), reading(error="cut"), reading(tokens=7)):
        count(tally, REQUEST, one)
    assert (tally.whole, tally.left, tally.tokens) == (1, 1, 8)
    assert tally.errors == ["cut", "7 tokens instead of 8"]


def judged(after: dict[str, Weight], waiting: int = 0, errors: int = 0) -> dict[str, bool | None]:
    tally = Tally(whole=10, left=5, errors=["cut"] * errors)
    rows = soak_figures(SOAK, tally, weights(100, 30), after, waiting)
    return {row.name.removeprefix("200 streams for 120 s: "): row.holds for row in rows}


def test_nothing_lost_and_nothing_left_holds_every_bar() -> None:
    assert set(judged(weights(109, 30)).values()) == {True}


def test_growth_of_any_kind_is_told() -> None:
    found = judged(weights(112, 31), waiting=1, errors=1)
    assert [name for name, holds in found.items() if not holds] == [
        "errors",
        "requests that wait or run afterwards",
        "growth of memory, coordinator",
        "more sockets and files, coordinator",
    ]


def test_warm_runners_are_no_part_of_it() -> None:
    roles = roles_of({"coordinator": 1, "a": 2, "b": 3}, [10, 11])
    assert roles == {"coordinator": [1], "workers": [2, 3], "runners": [10, 11]}
