"""How the text of the options that place an instance is read."""

from __future__ import annotations

import pytest

from muster.cli.wishes import choose_ranks, parse_network, parse_ranks, parse_split
from muster.errors import RequestError


@pytest.mark.parametrize(
    ("text", "nodes", "model", "group", "found"),
    [
        (None, 0, True, False, (1, True)),
        ("auto", 0, True, False, (1, True)),
        ("auto", 2, True, False, (2, True)),
        (None, 2, True, False, (2, False)),
        ("3", 2, True, False, (3, False)),
        (None, 0, False, True, (2, False)),
        (None, 0, False, False, (1, False)),
    ],
)
def test_how_many_ranks_are_asked_for(
    text: str | None, nodes: int, model: bool, group: bool, found: tuple[int, bool]
) -> None:
    assert choose_ranks(text, nodes, model=model, group=group) == found


@pytest.mark.parametrize("text", ["0", "1025", "-1", "two", "1.5", "", "²"])
def test_no_number_of_ranks(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_ranks(text)
    assert "--ranks is " in caught.value.message and caught.value.remedy


def test_only_a_model_chooses_its_ranks() -> None:
    with pytest.raises(RequestError, match="only a model's size"):
        choose_ranks("auto", 0, model=False, group=True)


def test_splits_and_networks() -> None:
    assert (parse_split(None), parse_split("20,12")) == ((), (20, 12))
    assert (parse_network(None), parse_network("10.0.0.7/24")) == ("", "10.0.0.0/24")
    for text in ("", "1,", "0,4", "a", "1.5,2"):
        with pytest.raises(RequestError, match="--split is"):
            parse_split(text)
    for text in ("10.0.0.0/33", "fe80::/64", "lan"):
        with pytest.raises(RequestError, match="--network is"):
            parse_network(text)
