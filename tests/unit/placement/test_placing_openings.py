"""A refusal tells of every node, also of those that were left out, and what it advises does fit."""

from __future__ import annotations

import random
import re

import msgspec
import pytest
from test_placing_rooms import A, B, C, replaced, state_of

from muster.bench.random_clusters import GIB, MIB, full_mesh, model, node, wish
from muster.known import Known
from muster.needs import ModelNeeds
from muster.placement import Cluster, Placement, Refusal, decide
from muster.placement.core import place
from muster.placement.nearest import nearest
from muster.spec import GroupWorkload, InstanceSpec, ModelWorkload, NodeId, ScriptWorkload
from muster.state import Aside, Draining, NodeDuty, Serving, State

MODEL = model()


def with_duty(state: State, name: NodeId, duty: NodeDuty) -> State:
    return with_node(state, name, duty=duty)


def with_node(state: State, name: NodeId, **fields: object) -> State:
    return State(nodes=state.nodes | {name: msgspec.structs.replace(state.nodes[name], **fields)})


def with_backends(state: State, **backends: tuple[str, ...]) -> State:
    nodes = {name: replaced(one, backends=backends.get(name, one.info.backends)) for name, one in state.nodes.items()}
    return State(nodes=nodes)


def refused(spec: InstanceSpec, state: State, needs: ModelNeeds | None = MODEL) -> Refusal:
    found = decide(spec, state, Known(), needs)
    assert isinstance(found, Refusal), found
    return found


def fits(spec: InstanceSpec, state: State, needs: ModelNeeds | None = MODEL) -> bool:
    return isinstance(decide(spec, state, Known(), needs), Placement)


def script(ranks: int, **fields: object) -> InstanceSpec:
    return InstanceSpec(workload=ScriptWorkload(path="/x.py"), ranks=ranks, **fields)  # pyright: ignore[reportArgumentType]


def group(ranks: int, **fields: object) -> InstanceSpec:
    return InstanceSpec(workload=GroupWorkload(), ranks=ranks, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("duty", [Draining("asked"), Aside("failed 3 times", until_ns=5)])
def test_a_node_that_was_drained_or_set_aside_is_told_of_and_advised_where_it_is_enough(duty: NodeDuty) -> None:
    state = with_duty(state_of(a=3, b=20), B, duty)
    spec = wish(1, auto_ranks=True)
    found = refused(spec, state)
    told = {one.node: one for one in found.shortfalls}
    assert told[B].what == "duty" and told[B].reason in found.message
    assert found.remedies[0] == "let node b take instances again: muster resume b"
    assert fits(spec, with_duty(state, B, Serving()))


def test_a_node_that_would_not_help_is_told_of_and_not_advised() -> None:
    state = with_duty(state_of(a=3, b=1), B, Draining("asked"))
    found = refused(wish(1), state)
    assert "node b is being drained" in found.message
    assert not [one for one in found.remedies if "resume" in one]


def test_of_many_that_were_drained_no_more_are_advised_than_it_takes() -> None:
    state = state_of(a=1, b=4, c=5, d=1)
    for name in (B, C, NodeId("d")):
        state = with_duty(state, name, Draining("asked"))
    spec = wish(1, auto_ranks=True)
    assert refused(spec, state).remedies[0] == "let nodes b, c take instances again: muster resume b c"
    assert fits(spec, with_duty(with_duty(state, B, Serving()), C, Serving()))
    assert not fits(spec, with_duty(state, B, Serving())) and not fits(spec, with_duty(state, C, Serving()))


def test_where_no_node_takes_instances_the_one_that_is_enough_is_named() -> None:
    state = with_duty(with_duty(state_of(a=3, b=20), B, Draining("x")), A, Draining("x"))
    found = refused(wish(1), state)
    assert found.remedies == ("let node b take instances again: muster resume b",)
    (vain,) = refused(wish(1, memory_bytes=40 * GIB), state).remedies
    assert vain == "start another worker: with these nodes alone it would not fit"
    assert [(one.node, one.what) for one in found.shortfalls] == [(A, "duty"), (B, "duty")]
    named = refused(wish(1, nodes=(B,)), state)
    assert named.remedies == ("let node b take instances again: muster resume b",)


def test_nodes_that_are_away_are_told_of_and_may_come_back() -> None:
    lost = with_node(state_of(a=3, b=20), B, lost="pulled")
    suspect = with_node(state_of(a=3, b=20), B, suspect="silent for 2 s")
    for state, reason in ((lost, "is lost: pulled"), (suspect, "is suspect: silent for 2 s")):
        found = refused(wish(1), state)
        assert f"node b {reason}" in found.message
        assert found.remedies[0] == "bring node b back: start its worker again, or wait for it"
        assert fits(wish(1), with_node(state, B, lost=None, suspect=None))


def test_a_node_with_something_left_on_it_has_to_be_cleared_first() -> None:
    state = with_duty(state_of(a=3, b=20), B, Aside("runner 17 does not end", remedy="Restart node b."))
    assert refused(wish(1), state).remedies[0] == "clear node b (Restart node b)"


def test_nodes_that_were_named_and_are_too_small_can_be_left_out() -> None:
    state = state_of(a=3, b=20)
    found = refused(wish(1, nodes=(A,)), state)
    assert found.remedies[0] == "leave --nodes out"
    assert fits(wish(1), state)
    assert not [one for one in found.remedies if "more node" in one]


def test_where_only_more_ranks_help_that_is_said_too() -> None:
    state = state_of(a=3, b=4, c=5)
    found = refused(wish(1, nodes=(A,)), state)
    assert found.remedies[0] == "leave --nodes out and use --ranks auto"
    assert fits(wish(1, auto_ranks=True), state)


def test_one_of_the_named_nodes_can_be_left_out() -> None:
    state = state_of(a=3, b=20)
    spec = wish(2, nodes=(A, B), workload_sharding="tensor")
    found = refused(spec, state)
    assert "use --nodes b --ranks 2" in found.remedies
    assert fits(msgspec.structs.replace(spec, nodes=(B,)), state)


def test_named_nodes_that_no_others_could_stand_in_for() -> None:
    state = state_of(a=1, b=2)
    found = refused(wish(1, nodes=(A,), workload_concurrency=1), state)
    (more,) = [one for one in found.remedies if "one more node" in one]
    assert more.startswith("leave --nodes out, and start one more node with at least ")
    least = int(more.split("at least ")[1].split(" GiB")[0])
    assert more.endswith(" GiB free and use --ranks 3")
    assert not fits(wish(3), state_of(a=1, b=2, c=least - 1)) and fits(wish(3), state_of(a=1, b=2, c=least))
    bare = refused(script(1, nodes=(A,), memory_bytes=40 * GIB), state, None)
    assert bare.remedies == ("delete an instance there (muster ps)", "name others with --nodes")
    again = decide(script(1, nodes=(A,), memory_bytes=40 * GIB), state, Known(), advise=False)
    assert isinstance(again, Refusal) and again.remedies == bare.remedies, "of an attempt, which is not advised on"


def test_scripts_and_groups_are_told_how_many_ranks_do_fit() -> None:
    state = state_of(a=3, b=2)
    found = refused(script(9, memory_bytes=GIB), state, None)
    assert "use --ranks 5" in found.remedies
    assert fits(script(5, memory_bytes=GIB), state, None) and not fits(script(6, memory_bytes=GIB), state, None)
    assert [(one.needed_bytes, one.available_bytes, one.missing_bytes) for one in found.shortfalls] == [
        (GIB, 0, GIB)
    ] * 2
    small = refused(group(2, memory_bytes=2 * GIB), state_of(a=1), None)
    assert small.shortfalls[0].missing_bytes == GIB
    assert not [one for one in small.remedies if "--ranks" in one], "a group of one is none"


def test_an_own_number_for_the_memory_can_be_left_out() -> None:
    state = state_of(a=20)
    found = refused(wish(1, memory_bytes=40 * GIB), state)
    assert "leave --memory out" in found.remedies and fits(wish(1), state)


def test_every_node_that_lacks_the_backend_is_told_of() -> None:
    state = with_backends(state_of(a=20, b=20, c=20), a=("mpi",), b=("nccl",), c=())
    found = refused(group(2), state, None)
    assert [(one.node, one.what) for one in found.shortfalls] == [(A, "backend"), (B, "backend"), (C, "backend")]
    assert all(one.reason in found.message for one in found.shortfalls)
    assert not [one for one in found.remedies if "--backend ring" in one], "nobody has it"


def test_a_node_without_the_backend_does_not_vanish_beside_one_that_is_too_small() -> None:
    state = with_backends(state_of(a=3, b=5), b=("mpi",))
    found = refused(wish(2), state)
    assert "node a has 3.0 GiB free" in found.message
    assert "MLX on node b has no ring backend (it has: mpi)" in found.message


def test_the_ring_is_advised_where_it_fits_and_only_there() -> None:
    state = state_of(a=20, b=20)
    assert refused(group(2, backend="jaccl"), state, None).remedies[0] == "use --backend ring"
    assert fits(group(2, backend="ring"), state, None)
    mixed = with_backends(state, a=("mpi",), b=("mpi",))
    assert "use --backend ring" not in refused(group(2, backend="jaccl"), mixed, None).remedies


def mesh(**rooms: float) -> Cluster:
    return Cluster(nodes=tuple(node(name, int(room * GIB)) for name, room in rooms.items()))


def core_refused(cluster: Cluster, spec: InstanceSpec, needs: ModelNeeds = MODEL) -> Refusal:
    found = place(cluster, full_mesh("abc"), needs, spec)
    assert isinstance(found, Refusal), found
    return found


def grown(cluster: Cluster, **extra: int) -> Cluster:
    nodes = [msgspec.structs.replace(one, free_bytes=one.free_bytes + extra.get(one.node, 0)) for one in cluster.nodes]
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("rooms", "split", "named"),
    [
        ({"a": 4, "b": 4}, (11, 1), False),
        ({"a": 2, "b": 3}, (6, 6), False),
        ({"a": 3, "b": 20}, (11, 1), True),
        ({"a": 20, "b": 3}, (1, 11), True),
        ({"a": 4, "b": 3, "c": 3}, (4, 7, 1), False),
    ],
)
def test_a_split_is_refused_with_what_each_rank_lacks(
    rooms: dict[str, float], split: tuple[int, ...], named: bool
) -> None:
    cluster = msgspec.structs.replace(mesh(**rooms), named=named)
    spec = wish(len(split), split=split, nodes=tuple(map(NodeId, rooms)) if named else ())
    found = core_refused(cluster, spec)
    assert found.shortfalls and all(one.missing_bytes > 0 for one in found.shortfalls)
    assert all(one.needed_bytes - one.available_bytes == one.missing_bytes for one in found.shortfalls)
    assert " layer(s) of rank " in found.message
    lacking = {one.node: one.missing_bytes for one in found.shortfalls}
    assert isinstance(place(grown(cluster, **lacking), full_mesh("abc"), MODEL, spec), Placement)
    for name in lacking:
        fewer = lacking | {name: lacking[name] - 1}
        assert isinstance(place(grown(cluster, **fewer), full_mesh("abc"), MODEL, spec), Refusal)


def test_heavy_ends_are_told_where_each_node_by_itself_has_room() -> None:
    heavy = msgspec.structs.replace(
        model(12, GIB // 8), outside_bytes=8 * GIB, embedding_bytes=4 * GIB, head_bytes=4 * GIB
    )
    cluster = mesh(a=3, b=3)
    spec = wish(2, workload_sharding="pipeline")
    found = core_refused(cluster, spec, heavy)
    assert "share a machine" not in found.message
    assert "with the embedding beside the first of them and the head beside the last" in found.message
    assert "node a has 3.0 GiB free, room for 0 of the first layers, 0 of the last, 12 of others" in found.message
    more = found.shortfalls[0].missing_bytes
    assert more and [one.missing_bytes for one in found.shortfalls] == [more] * 2
    assert isinstance(place(grown(cluster, a=more, b=more), full_mesh("ab"), heavy, spec), Placement)
    less = more - 64 * MIB
    assert isinstance(place(grown(cluster, a=less, b=less), full_mesh("ab"), heavy, spec), Refusal)
    assert nearest(cluster, full_mesh("ab"), heavy, spec)


def test_nodes_that_share_a_machine_are_told_how_much_it_lacks() -> None:
    nodes = (node("a", 20 * GIB, machine="m"), node("b", 20 * GIB, machine="m"))
    cluster = Cluster(nodes=nodes, pools={"m": 6 * GIB})
    spec = wish(2, workload_sharding="pipeline")
    found = core_refused(cluster, spec)
    assert "side by side on nodes that share a machine, each about " in found.message
    more = found.shortfalls[0].missing_bytes
    larger = msgspec.structs.replace(cluster, pools={"m": 6 * GIB + 2 * more})
    assert isinstance(place(larger, full_mesh("ab"), MODEL, spec), Placement)


def test_ranks_that_need_a_node_each_say_so() -> None:
    found = core_refused(mesh(a=20, b=0.1), wish(2, memory_bytes=5 * GIB, workload_sharding="tensor"))
    assert "2 rank(s) of 5.0 GiB do not fit, each on a node of its own: node b has 102 MiB free" in found.message
    several = core_refused(mesh(a=9), wish(3, memory_bytes=4 * GIB, workload_sharding="pipeline"))
    assert several.message == (
        "3 rank(s) of 4.0 GiB do not fit: node a takes 2 of them, then has 1024 MiB left, 3.0 GiB short"
    )


def test_a_number_of_ranks_that_cannot_be_sharded_is_no_defect_beside_one_that_can() -> None:
    spec = wish(3, memory_bytes=40 * GIB, auto_ranks=True, workload_sharding="tensor")
    found = core_refused(mesh(a=9, b=9, c=9, d=9), spec)
    assert found.message.startswith("4 rank(s) of 40960 MiB each do not fit: node a has 9216 MiB left")


def test_a_node_without_links_is_one_shortfall_however_many_it_lacks() -> None:
    names = [f"n{number}" for number in range(9)]
    found = place(mesh(**dict.fromkeys(names, 20)), full_mesh(()), None, group(2))
    assert isinstance(found, Refusal)
    assert [(one.node, one.what) for one in found.shortfalls] == [(name, "link") for name in names]
    assert found.shortfalls[0].reason == "node n0 has no link to n1, n2, n3, n4 and 4 more nodes"


def test_the_ring_is_not_advised_to_nodes_that_have_jaccl_only() -> None:
    state = with_backends(state_of(a=20, b=20), a=("jaccl",), b=("jaccl",))
    found = refused(group(2, backend="jaccl"), state, None)
    assert "cannot form a jaccl" in found.message
    assert not [one for one in found.remedies if "--backend ring" in one]


def test_missing_links_are_not_blamed_for_missing_memory() -> None:
    heavy = msgspec.structs.replace(
        model(12, GIB // 8), outside_bytes=8 * GIB, embedding_bytes=4 * GIB, head_bytes=4 * GIB
    )
    found = place(mesh(a=3, b=3, c=3), full_mesh("ab"), heavy, wish(2, workload_sharding="pipeline"))
    assert isinstance(found, Refusal)
    assert "reach each other" not in found.message and "with the embedding" in found.message


#: What is said where nothing is known to be enough, or what no wish can be tried with.
UNTRIED = (
    "start another worker",
    "use nodes whose",
    "delete an instance",
    "start workers on more",
    "name others",
    "see ",
    "name nodes",
    "use a",
    "bring ",
)


def followed(remedy: str, spec: InstanceSpec, state: State) -> tuple[InstanceSpec, State]:
    """What becomes of the wish and the cluster when somebody does what was advised."""
    workload = spec.workload
    assert isinstance(workload, ModelWorkload)
    if remedy.startswith("leave --nodes out"):
        spec = msgspec.structs.replace(spec, nodes=())
        remedy = remedy.removeprefix("leave --nodes out").removeprefix(", and ").removeprefix(" and ")
    if "muster resume " in remedy:
        for name in remedy.split("muster resume ")[1].split():
            state = with_duty(state, NodeId(name), Serving())
    if "one more node" in remedy:
        gib = int(remedy.split("at least ")[1].split()[0])
        more = state_of(a=0, b=0, c=0, d=0, e=0, f=gib).nodes
        state = State(nodes=state.nodes | {NodeId("f"): more[NodeId("f")]})
    for option, value in re.findall(r"--([a-z]+) (\S+)", remedy):
        match option:
            case "ranks":
                spec = msgspec.structs.replace(
                    spec, ranks=1 if value == "auto" else int(value), auto_ranks=value == "auto"
                )
            case "nodes":
                spec = msgspec.structs.replace(spec, nodes=tuple(map(NodeId, value.split(","))))
            case "backend":
                spec = msgspec.structs.replace(spec, backend=value)
            case "context":
                spec = msgspec.structs.replace(
                    spec, workload=msgspec.structs.replace(workload, context_tokens=int(value))
                )
            case "concurrency":
                spec = msgspec.structs.replace(spec, workload=msgspec.structs.replace(workload, concurrency=int(value)))
            case "sharding":
                spec = msgspec.structs.replace(spec, workload=msgspec.structs.replace(workload, sharding=value))
            case _:
                assert (option, value) in {("split", "out"), ("memory", "out")}, remedy
    if remedy.startswith("leave --split"):
        spec = msgspec.structs.replace(spec, split=())
    if remedy.startswith("leave --memory"):
        spec = msgspec.structs.replace(spec, memory_bytes=None)
    return spec, state


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_advised_does_fit(seed: int) -> None:
    draw = random.Random(seed)
    tried: set[str] = set()
    for _ in range(60):
        names = "abcde"[: draw.randint(1, 5)]
        state = state_of(**{name: draw.randint(1, 9) for name in names})
        state = with_backends(state, **{name: draw.choice([("ring",)] * 4 + [("mpi",)]) for name in names})
        for name in names:
            state = with_duty(state, NodeId(name), draw.choice([Serving(), Serving(), Draining("x")]))
        named = tuple(map(NodeId, draw.sample(names, draw.choice([0, 0, 1, min(2, len(names))]))))
        ranks = max(len(named), draw.randint(1, 3))
        split = draw.choice([(), (), (12,) if ranks == 1 else (8, 4) if ranks == 2 else (4, 4, 4)])
        spec = wish(
            ranks,
            nodes=named,
            split=split,
            memory_bytes=draw.choice([None, None, 4 * GIB]),
            auto_ranks=not split and draw.random() < 0.3,
            workload_sharding=draw.choice(["auto", "pipeline"] if split else ["auto", "pipeline", "tensor"]),
            workload_context_tokens=draw.choice([None, 32_768]),
            workload_concurrency=draw.choice([1, 8]),
        )
        needs = model(12, kv=draw.choice([4096, 65_536]))
        found = decide(spec, state, Known(), needs)
        if isinstance(found, Placement) or found.kind != "placement-refused":
            continue
        assert found.shortfalls and ": ;" not in found.message and not found.message.endswith(": ")
        untold = [one for one in found.shortfalls if one.reason.removeprefix("node ") not in found.message]
        assert not untold or (named and untold[0].what == "duty"), (untold, found.message)
        for remedy in found.remedies:
            if remedy.startswith(UNTRIED) or ", and use a" in remedy or "unknown" in found.message:
                continue
            again, then = followed(remedy, spec, state)
            assert fits(again, then, needs), (remedy, found.message, spec)
            tried.add(" ".join(remedy.split()[:3]))
    assert len(tried) >= 6, tried
