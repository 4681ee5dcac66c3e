"""Rows that go through the group, and the comparison of what they say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import MembershipError
from muster.group.verify import ROW_BYTES, Identity, check, decode, encode, own_identity

MINE = Identity("one", 3, 0, 2, "0.1.0", "0.32.4", "0.32.2", "3.11.4", "abc")
OTHER = msgspec.structs.replace(MINE, rank=1)

identities = st.builds(
    Identity,
    instance=st.text(max_size=40),
    attempt=st.integers(0, 10**6),
    rank=st.integers(0, 500),
    world_size=st.integers(2, 500),
    muster=st.text(max_size=10),
    mlx=st.text(max_size=10),
    mlx_lm=st.text(max_size=10),
    python=st.text(max_size=10),
    workload=st.text(max_size=64),
)


@given(st.lists(identities, min_size=1, max_size=4))
def test_rows_say_what_was_put_in(everyone: list[Identity]) -> None:
    rows = b"".join(map(encode, everyone))
    assert len(rows) == ROW_BYTES * len(everyone)
    assert decode(rows) == tuple(everyone)


@given(st.binary(min_size=ROW_BYTES, max_size=ROW_BYTES))
def test_garbage_names_its_rank(row: bytes) -> None:
    with pytest.raises(MembershipError, match="rank 1 sent something that is no identity"):
        decode(encode(MINE) + row)


@pytest.mark.parametrize("position", [0, 8, 9, 10, 11, 40, ROW_BYTES - 1])
def test_a_damaged_row_is_refused_or_differs(position: int) -> None:
    row = bytearray(encode(MINE))
    row[position] ^= 0xFF
    try:
        damaged = decode(bytes(row))
    except MembershipError as error:
        assert "rank 0" in error.message
    else:
        assert damaged != (MINE,)


@pytest.mark.parametrize("rows", [b"", b"x", bytes(ROW_BYTES + 1)])
def test_incomplete_rows_are_refused(rows: bytes) -> None:
    with pytest.raises(MembershipError, match="are not rows"):
        decode(rows)


def test_an_identity_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MembershipError, match=r"rank 0: its identity takes \d+ bytes"):
        encode(msgspec.structs.replace(MINE, instance="x" * ROW_BYTES))


def test_equal_ranks_pass() -> None:
    check(MINE, (MINE, OTHER))
    check(OTHER, (MINE, msgspec.structs.replace(OTHER)))


def test_the_last_number_of_python_may_differ() -> None:
    check(MINE, (MINE, msgspec.structs.replace(OTHER, python="3.11.9")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instance", "two"),
        ("attempt", 2),
        ("world_size", 3),
        ("muster", "0.2.0"),
        ("mlx", "0.32.3"),
        ("mlx_lm", "0.32.1"),
        ("python", "3.12.4"),
        ("workload", "abd"),
    ],
)
def test_a_difference_names_rank_field_and_both_values(field: str, value: object) -> None:
    with pytest.raises(MembershipError) as caught:
        check(MINE, (MINE, msgspec.structs.replace(OTHER, **{field: value})))
    assert caught.value.message == (f"rank 1 has {field} {value!r}, rank 0 has {getattr(MINE, field)!r}")
    assert caught.value.remedy


def test_a_rank_in_the_wrong_place_is_named() -> None:
    with pytest.raises(MembershipError, match="rank 1 says that it is rank 0"):
        check(MINE, (MINE, MINE))
    with pytest.raises(MembershipError, match="3 ranks answered, world size is 2"):
        check(MINE, (MINE, OTHER, OTHER))


def test_own_identity_knows_the_installed_versions() -> None:
    mine = own_identity("one", 1, 0, 2, "abc")
    assert mine.mlx not in ("", "none")
    assert mine.python.count(".") == 2
