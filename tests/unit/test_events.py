"""Events keep their bytes, and what a newer peer adds is no obstacle.

`golden_events.json` holds one example per event as it was first published. An entry is never changed: it must decode to
the example with this version too, and what this version writes must hold every field of it. For a new event, add an
example here and the bytes that the failing test shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.events import (
    EVENT_TYPES,
    AdoptedRank,
    AttemptEnding,
    AttemptStarted,
    CoordinatorStarted,
    Envelope,
    Event,
    Fact,
    InstanceAdopted,
    InstanceCleared,
    InstanceCreated,
    InstanceDeleted,
    InstanceDeleting,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    InstanceRetried,
    NodeChanged,
    NodeDraining,
    NodeHeard,
    NodeJoined,
    NodeLost,
    NodeResumed,
    NodeSetAside,
    NodeSuspected,
    RankConnected,
    RankFailed,
    RankFetched,
    RankGone,
    RankListening,
    RankLoaded,
    RankPrepared,
    RankReady,
    ReportId,
    Unknown,
    decode_envelope,
    decode_event,
    encode_envelope,
    encode_event,
    kind_of,
)
from muster.spec import (
    COORDINATOR,
    Address,
    Assignment,
    BootId,
    Deadlines,
    Failure,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeAddress,
    NodeId,
    NodeInfo,
    Phase,
    RestartOnFailure,
)

GOLDEN = cast("dict[str, str]", json.loads((Path(__file__).parent / "golden_events.json").read_text()))

ONE, NODE, BOOT = InstanceId("one"), NodeId("a"), BootId("b1")
ASSIGNMENTS = (Assignment(rank=0, node=NODE, boot=BOOT),)
FAILURE = Failure(
    kind="formation-failed",
    message="no neighbour",
    remedy="Look at the cable.",
    phase=Phase.FORMING,
    rank=0,
    node=NODE,
    exit_code=-9,
    retryable=True,
    secondary=True,
    log_tail=("last", "words"),
)
INFO = NodeInfo(
    node=NODE,
    boot=BOOT,
    hostname="host",
    machine="machine",
    pid=41,
    addresses=(NodeAddress(host="10.0.0.1", network="10.0.0.0/24"),),
    backends=("ring",),
    memory_bytes=2**34,
    max_ranks=2,
    versions={"mlx": "0.32.4"},
)
SPEC = InstanceSpec(
    workload=ModelWorkload(model="some/model", revision="main", sharding="tensor"),
    name="mine",
    ranks=1,
    nodes=(NODE,),
    backend="ring",
    restart=RestartOnFailure(maximum=3),
    deadlines=Deadlines(),
    memory_bytes=2**30,
)
ADOPTED = AdoptedRank(
    rank=0,
    node=NODE,
    boot=BOOT,
    pid=42,
    process_started=1.5,
    addresses=(Address(host="10.0.0.1", port=5000, network="10.0.0.0/24"),),
    steps="10.0.0.1:5001",
    layers=(0, 4),
    sharding="pipeline",
    weights_bytes=1000,
)


def of(rank: type[RankListening] | type[RankReady]) -> Event:
    return rank(instance=ONE, attempt=1, rank=0, node=NODE, boot=BOOT)


EXAMPLES: tuple[Event, ...] = (
    CoordinatorStarted(epoch="e", boot=BOOT, version="0.1.0"),
    NodeJoined(info=INFO),
    NodeSuspected(node=NODE, boot=BOOT, reason="late"),
    NodeHeard(node=NODE, boot=BOOT),
    NodeLost(node=NODE, boot=BOOT, reason="left"),
    NodeDraining(node=NODE, reason="new memory", now=True),
    NodeSetAside(node=NODE, boot=BOOT, reason="it fails", remedy="Mend it.", until_ns=1_700_000_000_000_000_000),
    NodeChanged(
        node=NODE,
        boot=BOOT,
        candidates=(NodeAddress(host="10.0.0.2", network="10.0.0.0/24"),),
        gone=("10.0.0.1",),
        new=("10.0.0.2",),
    ),
    NodeResumed(node=NODE, reason="tried again", trial=True),
    InstanceCreated(instance=ONE, attempt=1, spec=SPEC, assignments=ASSIGNMENTS, backend="ring"),
    AttemptStarted(instance=ONE, attempt=2, assignments=ASSIGNMENTS, backend="jaccl"),
    AttemptEnding(instance=ONE, attempt=2, reason="drained", drain_seconds=10.0),
    InstanceRetried(instance=ONE, attempt=2),
    InstanceAdopted(instance=ONE, attempt=2, spec=SPEC, backend="ring", ranks=(ADOPTED,), key="mine"),
    InstanceCleared(instance=ONE, attempt=2, reason="rank 1 is missing"),
    InstanceReady(instance=ONE, attempt=1),
    InstanceFailed(instance=ONE, attempt=1, failure=FAILURE, retry_at_ns=1_700_000_000_000_000_000),
    InstanceFinished(instance=ONE, attempt=1),
    InstanceDeleting(instance=ONE, attempt=1, reason="asked"),
    InstanceDeleted(instance=ONE, attempt=1),
    RankPrepared(
        instance=ONE,
        attempt=1,
        rank=0,
        node=NODE,
        boot=BOOT,
        pid=42,
        process_started=1.5,
        addresses=(Address(host="10.0.0.1", port=5000, network="10.0.0.0/24"),),
        steps="10.0.0.1:5001",
    ),
    RankFetched(
        instance=ONE, attempt=1, rank=0, node=NODE, boot=BOOT, source="node b", files=3, bytes=2**20, seconds=1.5
    ),
    of(RankListening),
    RankConnected(instance=ONE, attempt=1, rank=0, node=NODE, boot=BOOT, seconds=0.25),
    RankLoaded(
        instance=ONE,
        attempt=1,
        rank=0,
        node=NODE,
        boot=BOOT,
        layers=(0, 4),
        sharding="pipeline",
        weights_bytes=1000,
        seconds=0.5,
    ),
    of(RankReady),
    RankFailed(instance=ONE, attempt=1, rank=0, node=NODE, boot=BOOT, failure=FAILURE),
    RankGone(instance=ONE, attempt=1, rank=0, node=NODE, boot=BOOT, exit_code=-9),
)


def subclasses(kind: type[Fact]) -> set[type[Fact]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


def test_union_is_every_tagged_fact_and_every_one_is_pinned() -> None:
    tagged = {kind for kind in subclasses(Fact) if not kind.__subclasses__()}
    assert set(EVENT_TYPES) == tagged
    assert [type(example) for example in EXAMPLES] == list(EVENT_TYPES)
    assert list(GOLDEN) == [kind_of(example) for example in EXAMPLES]


def assert_holds(now: object, published: object) -> None:
    """Every field that was published is there with its value; there may be further fields."""
    if isinstance(published, dict) and isinstance(now, dict):
        for name, value in cast("dict[str, object]", published).items():
            assert_holds(cast("dict[str, object]", now)[name], value)
    elif isinstance(published, list) and isinstance(now, list):
        assert len(cast("list[object]", now)) == len(cast("list[object]", published))
        for one, other in zip(cast("list[object]", now), cast("list[object]", published), strict=True):
            assert_holds(one, other)
    else:
        assert (type(now), now) == (type(published), published)


@pytest.mark.parametrize("example", EXAMPLES, ids=kind_of)
def test_bytes_are_as_published(example: Event) -> None:
    published = bytes.fromhex(GOLDEN.get(kind_of(example), ""))
    assert published, f"add it: {bytes(encode_event(example)).hex()}"
    assert decode_event(published) == example
    assert_holds(msgspec.msgpack.decode(encode_event(example)), msgspec.msgpack.decode(published))


def changed(kind: str, **fields: object) -> bytes:
    """The golden example of `kind` with some fields set otherwise, and without those that are `...`."""
    decoded = cast("dict[str, object]", msgspec.msgpack.decode(bytes.fromhex(GOLDEN[kind])))
    merged = {**decoded, **fields}
    return msgspec.msgpack.encode({name: value for name, value in merged.items() if value is not ...})


def test_unknown_tag_is_kept_and_skipped() -> None:
    body = changed("rank.ready", type="rank.teleported", where={"x": [1, 2.5, None, b"raw"]})
    event = decode_event(body)
    assert event == Unknown("rank.teleported")
    assert kind_of(event) == "rank.teleported"
    packed = Envelope(sequence=1, time_ns=2, origin=NODE, cause=0, body=msgspec.Raw(body))
    assert bytes(decode_envelope(encode_envelope(packed)).body) == body


@pytest.mark.parametrize("example", EXAMPLES, ids=kind_of)
def test_unknown_field_is_ignored(example: Event) -> None:
    assert decode_event(changed(kind_of(example), colour="red", nested={"deep": [1]})) == example


def test_missing_fields_that_came_later_get_their_defaults() -> None:
    event = decode_event(changed("rank.prepared", addresses=..., steps=...))
    assert isinstance(event, RankPrepared)
    assert (event.addresses, event.steps) == ((), None)


@pytest.mark.parametrize(
    "body",
    [
        changed("rank.ready", attempt="one"),
        changed("rank.ready", node=7),
        changed("rank.ready", rank=None),
        changed("rank.ready", boot=...),
        changed("instance.created", backend="smoke-signals"),
        changed("instance.created", spec={"workload": {"type": "model", "model": "m"}, "ranks": 0}),
        changed("rank.ready", type=5),
        changed("rank.ready", type=...),
        msgspec.msgpack.encode(["rank.ready"]),
        msgspec.msgpack.encode(None),
        b"",
        bytes.fromhex(GOLDEN["rank.ready"])[:-3],
        bytes.fromhex(GOLDEN["rank.ready"]) + b"\x00",
    ],
    ids=lambda body: bytes(body).hex()[:24],
)
def test_what_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(body)


@given(st.binary(max_size=200))
def test_garbage_is_an_event_or_a_decode_error(body: bytes) -> None:
    for decode in (decode_event, decode_envelope):
        try:
            decode(body)
        except msgspec.DecodeError:
            continue


def test_a_field_that_came_later_is_missing_in_an_old_log() -> None:
    started, gone = (decode_event(bytes.fromhex(GOLDEN[kind])) for kind in ("coordinator.started", "rank.gone"))
    assert isinstance(started, CoordinatorStarted)
    assert isinstance(gone, RankGone)
    assert (started.term, gone.left, gone.remedy) == (1, "", "")
    later = msgspec.structs.replace(started, term=2), msgspec.structs.replace(gone, left="pid 7", remedy="Reboot.")
    assert [decode_event(encode_event(event)) for event in later] == list(later)
    old = msgspec.msgpack.encode({"node": "a", "boot": "b1", "n": 3})
    assert msgspec.msgpack.decode(old, type=ReportId).happened_ns == 0


def test_envelope_keeps_its_bytes() -> None:
    report = ReportId(node=NODE, boot=BOOT, n=3)
    for example in EXAMPLES:
        envelope = Envelope(
            sequence=7, time_ns=8, origin=COORDINATOR, cause=6, body=encode_event(example), report=report
        )
        packed = encode_envelope(envelope)
        assert decode_envelope(packed) == envelope
        assert decode_envelope(packed).event() == example
        assert encode_envelope(decode_envelope(packed)) == packed
    assert encode_envelope(
        Envelope(sequence=1, time_ns=2, origin=NODE, cause=0, body=encode_event(InstanceReady(instance=ONE, attempt=1)))
    ) == bytes.fromhex(
        "86a873657175656e636501a774696d655f6e7302a66f726967696ea161a5636175736500a4626f6479"
        "83a474797065ae696e7374616e63652e7265616479a8696e7374616e6365a36f6e65a7617474656d707401a67265706f7274c0"
    )
