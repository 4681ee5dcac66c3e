"""What a client may ask for: bad values are refused where they enter, by name and with the value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.spec import (
    Address,
    Deadlines,
    Failure,
    GroupWorkload,
    InstanceSpec,
    NodeId,
    Phase,
    RestartOnFailure,
)

GROUP = {"type": "group"}


def decode(**fields: object) -> InstanceSpec:
    """As a request on the wire is decoded."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode({"workload": GROUP} | fields), type=InstanceSpec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be between 1 and 1024"),
        ({"ranks": 1025}, "ranks is 1025"),
        ({"ranks": 3, "nodes": ["a", "b", "a"]}, "names a node twice: a, b, a"),
        ({"ranks": 1, "nodes": ["a", "b"]}, "2 nodes for 1 ranks"),
        ({"name": ""}, "name is ''"),
        ({"name": "x" * 65}, "1 to 64 printable"),
        ({"name": "a\nb"}, "printable"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"backend": "mpi"}, "backend"),
        ({"restart": {"type": "on-failure", "maximum": 0}}, "restart.maximum is 0"),
        ({"restart": {"type": "on-failure", "backoff_seconds": -1.0}}, "must be between 0 and 86400"),
        ({"restart": {"type": "on-failure", "backoff_max_seconds": -0.1}}, "must be between 0 and 86400"),
        ({"deadlines": {"form_seconds": 0.0}}, "deadlines.form_seconds is 0.0"),
        ({"deadlines": {"load_seconds": 86_401.0}}, "deadlines.load_seconds is 86401.0"),
        ({"deadlines": {"warm_seconds": float("nan")}}, "deadlines.warm_seconds is nan"),
        ({"deadlines": {"stop_seconds": float("inf")}}, "deadlines.stop_seconds is inf"),
    ],
)
def test_a_bad_value_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message.replace("(", r"\(")):
        decode(**fields)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("field", ["backoff_seconds", "backoff_max_seconds"])
def test_a_backoff_that_no_clock_can_hold_is_refused(field: str, value: float) -> None:
    fields: dict[str, Any] = {"backoff_seconds": 1e300, "backoff_max_seconds": 1e300} | {field: value}
    with pytest.raises(ValueError, match="restart"):
        RestartOnFailure(**fields)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.builds(
        InstanceSpec,
        workload=st.just(GroupWorkload()),
        ranks=st.integers(4, 1024),
        nodes=st.lists(st.text(min_size=1).map(NodeId), max_size=4, unique=True).map(tuple),
        memory_bytes=st.none() | st.integers(0, 2**62),
    )
)
def test_a_spec_survives_the_wire(spec: InstanceSpec) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=InstanceSpec) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=InstanceSpec) == spec


def test_a_field_of_a_newer_client_is_ignored() -> None:
    assert decode(future=1) == InstanceSpec(workload=GroupWorkload())


def test_the_phases_that_can_be_late_have_a_deadline() -> None:
    deadlines = Deadlines(prepare_seconds=1, form_seconds=2, load_seconds=3, warm_seconds=4)
    limits = {phase: deadlines.of(phase) for phase in Phase}
    assert limits == {
        Phase.PLACING: None,
        Phase.PREPARING: 1,
        Phase.FORMING: 2,
        Phase.LOADING: 3,
        Phase.WARMING: 4,
        Phase.RUNNING: None,
        Phase.STOPPING: None,
    }


def test_a_failure_reads_as_one_sentence() -> None:
    failure = Failure(kind="k", message="it broke", remedy="Mend it.", phase=Phase.LOADING, rank=1, node=NodeId("b"))
    assert failure.sentence() == "rank 1 on node b, while loading: it broke. Mend it."
    assert msgspec.structs.replace(failure, rank=-1).sentence() == "node b, while loading: it broke. Mend it."
    nobody = msgspec.structs.replace(failure, rank=-1, node=NodeId(""), remedy="")
    assert nobody.sentence() == "while loading: it broke."


def test_an_address_is_written_as_mlx_reads_it() -> None:
    assert str(Address("10.0.0.2", 4000, "10.0.0.0/24")) == "10.0.0.2:4000"
