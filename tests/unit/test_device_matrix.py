"""What we let pass, MLX takes, and forms of it what we said; held against MLX's rules as its stand-in knows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.device_matrix import Use, topology, usage
from muster.errors import PayloadError
from muster.layout import Devices
from muster.testing.jaccl_rules import JacclConfig, read_config

ENTRIES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.sampled_from(["rdma_en2", "rdma_en3"]),
    st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=5),
)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[Any]]:
    """Mostly square ones, with an empty diagonal more often than not."""
    size = draw(st.integers(0, 10))
    entry = draw(st.sampled_from([ENTRIES, st.just("rdma_en2"), st.just(["a", "b"])]))
    rows: list[list[Any]] = [[draw(entry) for _ in range(size)] for _ in range(size)]
    if draw(st.booleans()):
        for rank in range(size):
            rows[rank][rank] = None
    if rows and draw(st.integers(0, 9)) == 0:
        rows[0].pop()
    return rows


def mlx_reads(rows: object, *, ring: bool, rank: int = 0) -> JacclConfig | str:
    variables = {"MLX_IBV_DEVICES": "file", "MLX_RANK": str(rank), "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"}
    if ring:
        variables["MLX_JACCL_RING"] = "1"
    try:
        return read_config(variables, lambda _: json.dumps(rows))
    except (RuntimeError, ValueError) as error:
        return str(error)


@settings(max_examples=200, deadline=None)
@given(matrices(), st.booleans())
def test_what_passes_here_passes_in_mlx(rows: list[list[Any]], ring: bool) -> None:
    devices: Devices = tuple(tuple(tuple(one) if isinstance(one, list) else one for one in row) for row in rows)
    found = mlx_reads(rows, ring=ring)
    try:
        expected = topology(devices, prefer_ring=ring)
    except PayloadError as error:
        assert error.remedy
        # What only we refuse: a rank that reaches itself, and a device that is listed twice.
        strict = any(row[rank : rank + 1] not in ([None], [[]], []) for rank, row in enumerate(rows)) or any(
            isinstance(one, list) and len(set(one)) != len(one) for row in rows for one in row
        )
        assert isinstance(found, str) or strict
        return
    assert isinstance(found, JacclConfig)
    assert found.topology == expected.value


@settings(max_examples=100, deadline=None)
@given(matrices(), st.booleans())
def test_queue_pairs_are_counted_as_mlx_makes_them(rows: list[list[Any]], ring: bool) -> None:
    devices: Devices = tuple(tuple(tuple(one) if isinstance(one, list) else one for one in row) for row in rows)
    for rank in range(len(rows)):
        found = mlx_reads(rows, ring=ring, rank=rank)
        if isinstance(found, str) or any(devices[number][number] for number in range(len(rows))):
            return
        counted = {name: use.queue_pairs for name, use in usage(devices, ring=found.topology == "ring")[rank].items()}
        made = [name for _, name in found.connections]
        assert counted == {name: made.count(name) for name in made}


def test_the_limit_of_memory_regions_lets_one_group_of_any_size_through() -> None:
    """Two ranks over one cable take most: the neighbour on both sides is the same."""
    pair: Devices = ((None, "rdma_en2"), ("rdma_en2", None))
    assert usage(pair, ring=False)[0] == {"rdma_en2": Use(1, 96)}
    assert usage(pair, ring=True)[0] == {"rdma_en2": Use(2, 64)}


@pytest.mark.parametrize(
    ("variables", "text", "reason"),
    [
        ({"MLX_RANK": "0"}, "[]", "via environment variables"),
        ({"MLX_RANK": "x"}, '[[null,"a"],["b",null]]', "rank 'x' of 2"),
        ({"MLX_RANK": "2"}, '[[null,"a"],["b",null]]', "rank '2' of 2"),
        ({}, "not json", "parse_error"),
        ({}, "{}", "start with an array"),
        ({}, '["a","b"]', "array of arrays"),
        ({}, "[[null,1],[1,null]]", "null, a string or array of strings"),
        ({"MLX_RANK": "0"}, "[[null]]", "valid mesh or a valid ring"),
        ({}, "[[null,[]],[[],null]]", "valid mesh or a valid ring"),
        ({"MLX_JACCL_COORDINATOR": "10.0.0.1"}, '[[null,"a"],["b",null]]', "Can't parse address"),
    ],
)
def test_the_stand_in_is_strict(variables: dict[str, str], text: str, reason: str) -> None:
    full = {"MLX_IBV_DEVICES": "file", "MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:5000"} | variables
    if "via" in reason:
        del full["MLX_JACCL_COORDINATOR"]
    with pytest.raises(RuntimeError, match=reason):
        read_config(full, lambda _: text)


def test_jaccl_variables_win_over_those_of_mlx() -> None:
    variables = {
        "MLX_IBV_DEVICES": "other",
        "JACCL_IBV_DEVICES": "file",
        "MLX_RANK": "0",
        "JACCL_RANK": "1",
        "JACCL_RING": "",
        "JACCL_COORDINATOR": "10.0.0.9:1",
        "MLX_JACCL_COORDINATOR": "10.0.0.1:5000",
    }
    found = read_config(variables, {"file": '[[null,"a"],["b",null]]'}.__getitem__)
    assert (found.rank, found.coordinator, found.topology) == (1, ("10.0.0.9", "1"), "ring")
    assert found.connections == ((0, "b"), (0, "b"))
