"""What is left on the nodes: by the operator, by the machine, by what others were given and do not use yet."""

from __future__ import annotations

import msgspec
import pytest

from muster.bench.random_clusters import GIB, MIB, full_mesh, model, node, wish
from muster.errors import PlacementError, ShardingError
from muster.events import InstanceId
from muster.facts import Gpu, HeldModel, NodeFacts
from muster.known import Known
from muster.layout import Layout, RankLayout
from muster.links import Measured, NodeLinks
from muster.placement import MODEL_RANK_BYTES, Cluster, Placement, Refusal, cluster_of, decide, place
from muster.placement.again import place_again, same_refusal
from muster.placement.choose import Chooser
from muster.placement.layouts import _sharers_of
from muster.spec import BootId, Failure, InstanceSpec, ModelWorkload, NodeAddress, NodeId, Phase
from muster.state import Assigned, Broken, Gone, Instance, Node, Rank, Running, State, reserved_bytes

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def state_of(**rooms: int) -> State:
    """Nodes with so many GiB, each a machine of its own with an address in one network."""
    nodes: dict[NodeId, Node] = {}
    for number, (name, gib) in enumerate(rooms.items()):
        address = NodeAddress(host=f"10.0.0.{number + 1}", network="10.0.0.0/24")
        info = msgspec.structs.replace(node(name, gib * GIB).info, addresses=(address,), candidates=(address,))
        nodes[info.node] = Node(info=info, since_ns=0)
    return State(nodes=nodes)


def on_machine(state: State, machine: str, *names: NodeId) -> State:
    nodes = dict(state.nodes)
    for name in names:
        nodes[name] = msgspec.structs.replace(
            nodes[name], info=msgspec.structs.replace(nodes[name].info, machine=machine)
        )
    return msgspec.structs.replace(state, nodes=nodes)


def running(state: State, name: NodeId, memory_bytes: int, **fields: object) -> State:
    """The state with an instance of one rank there that was laid out with so much."""
    instance = Instance(
        id=InstanceId("i"),
        spec=wish(1, **fields),
        created_ns=0,
        attempt=1,
        backend="ring",
        status=Running(),
        since_ns=0,
        ranks=(Rank(rank=0, node=name, boot=f"{name}-boot", state=Assigned(), since_ns=0),),
        created_by=1,
        caused_by=1,
        layout=Layout(ranks=(RankLayout(memory_bytes=memory_bytes),)),
        needs=model(),
    )
    return msgspec.structs.replace(state, instances={instance.id: instance})


def cluster(state: State, known: Known | None = None, spec: InstanceSpec | None = None) -> Cluster:
    return cluster_of(spec or wish(1), state, known or Known())[0]


def facts_of(name: NodeId, **fields: object) -> NodeFacts:
    return NodeFacts(node=name, boot=BootId(f"{name}-boot"), **fields)  # pyright: ignore[reportArgumentType]


def test_what_others_were_given_is_taken_off_by_rank() -> None:
    state = running(state_of(a=10, b=10), A, 4 * GIB)
    assert [one.free_bytes for one in cluster(state).nodes] == [6 * GIB, 10 * GIB]
    assert cluster(state).pools == {}, "nothing is known of the machines"


def test_a_spec_counts_where_there_is_no_layout() -> None:
    state = running(state_of(a=10), A, 0)
    instance = state.instances[InstanceId("i")]
    bare = msgspec.structs.replace(instance, layout=Layout(), spec=wish(1, memory_bytes=7))
    assert (reserved_bytes(instance, 0), reserved_bytes(bare, 0)) == (0, 7)


def test_a_machine_gives_what_is_available_less_what_is_promised_and_not_used() -> None:
    state = running(state_of(a=10, b=10), A, 4 * GIB)
    known = Known(available_bytes={A: 9 * GIB, B: 3 * GIB}, ranks_bytes={A: GIB})
    assert cluster(state, known).pools == {"machine-a": 6 * GIB, "machine-b": 3 * GIB}
    full = Known(available_bytes={A: 9 * GIB}, ranks_bytes={A: 5 * GIB})
    assert cluster(state, full).pools == {"machine-a": 9 * GIB}, "who uses more than promised is owed nothing"


def test_what_has_just_ended_is_not_counted_as_used() -> None:
    known = Known(available_bytes={A: 3 * GIB}, ranks_bytes={A: 5 * GIB})
    assert cluster(state_of(a=10), known).pools == {"machine-a": 8 * GIB}


def test_two_workers_of_one_machine_share_its_memory() -> None:
    state = running(on_machine(state_of(a=10, b=10), "m", A, B), A, 4 * GIB)
    known = Known(available_bytes={A: 8 * GIB, B: 8 * GIB}, ranks_bytes={A: GIB})
    assert cluster(state, known).pools == {"m": 5 * GIB}
    found = decide(wish(2, memory_bytes=3 * GIB), state, known, model())
    assert isinstance(found, Refusal)


def test_a_mac_gives_no_more_than_the_gpu_may_wire() -> None:
    facts = facts_of(A, memory_total_bytes=16 * GIB, wired_limit_bytes=11 * GIB)
    known = Known(facts={A: facts}, available_bytes={A: 14 * GIB})
    assert cluster(state_of(a=16), known).pools == {"machine-a": 11 * GIB}


GPU = Gpu(name="NVIDIA RTX 4090", memory_bytes=24 * GIB, free_bytes=20 * GIB)


def test_a_gpu_gives_no_more_than_its_own_memory() -> None:
    facts = facts_of(A, memory_total_bytes=128 * GIB, gpus=(Gpu(name="GT 710", memory_bytes=GIB, free_bytes=GIB), GPU))
    known = Known(facts={A: facts}, available_bytes={A: 120 * GIB})
    assert cluster(state_of(a=115), known).pools == {"machine-a": 20 * GIB}
    assert isinstance(decide(wish(1, memory_bytes=62 * GIB), state_of(a=115), known, model()), Refusal)
    on_cpu = Known(facts={A: msgspec.structs.replace(facts, device="cpu")}, available_bytes={A: 120 * GIB})
    assert cluster(state_of(a=115), on_cpu).pools == {"machine-a": 120 * GIB}, "MLX does not use it"


def test_of_a_gpu_what_is_promised_and_not_used_yet_is_taken_off() -> None:
    facts = facts_of(A, memory_total_bytes=128 * GIB, gpus=(GPU,))
    known = Known(facts={A: facts}, available_bytes={A: 120 * GIB}, ranks_bytes={A: 3 * GIB})
    assert cluster(running(state_of(a=115), A, 8 * GIB), known).pools == {"machine-a": 15 * GIB}
    full = msgspec.structs.replace(known, ranks_bytes={A: 8 * GIB})
    assert cluster(running(state_of(a=115), A, 8 * GIB), full).pools == {"machine-a": 16 * GIB}, "as told before it ran"
    assert cluster(state_of(a=115), full).pools == {"machine-a": 24 * GIB}, "it has just ended"


def test_what_ranks_took_of_a_gpu_since_it_was_looked_at_is_not_free() -> None:
    facts = facts_of(A, memory_total_bytes=128 * GIB, gpus=(GPU,), gpu_ranks_bytes=0)
    known = Known(facts={A: facts}, available_bytes={A: 120 * GIB}, ranks_bytes={A: 8 * GIB})
    assert cluster(running(state_of(a=115), A, 8 * GIB), known).pools == {"machine-a": 12 * GIB}
    later = msgspec.structs.replace(facts, gpu_ranks_bytes=8 * GIB)
    known = Known(facts={A: later}, available_bytes={A: 120 * GIB}, ranks_bytes={})
    assert cluster(state_of(a=115), known).pools == {"machine-a": 24 * GIB}, "it has ended since"


def test_links_that_were_measured_are_laid_out_and_copies_come_over_the_best() -> None:
    state = state_of(a=20, b=20, c=20)
    measured = tuple(
        Measured(
            other=other,
            other_boot=BootId(f"{other}-boot"),
            own="10.0.0.1",
            host=host,
            reached=True,
            dialled_back=True,
            rtt_us=50.0,
            mbps_out=rate,
            mbps_in=rate,
        )
        for other, host, rate in ((B, "10.0.0.2", 9000.0), (C, "10.0.0.3", 900.0))
    )
    held = HeldModel(model="org/model", path="/models/m")
    partly = HeldModel(model="org/model", path="/models/p", complete=False)
    known = Known(
        facts={A: facts_of(A, models=(partly,)), B: facts_of(B, models=(held,)), C: facts_of(C, models=(held,))},
        links={A: NodeLinks(node=A, boot=BootId("a-boot"), measured=measured)},
    )
    found = place(wish(2, nodes=(A, B)), state, known, model())
    first, second = found.layout.ranks
    assert first.next is not None and second.next is not None
    assert (first.next.own, first.next.host, first.next.mbps) == ("10.0.0.1", "10.0.0.2", 9000.0)
    assert (second.next.own, second.next.host) == ("10.0.0.2", "10.0.0.1")
    assert [(one.node, one.host, one.port, one.path) for one in first.sources] == [
        (B, "10.0.0.2", 7000, "/models/m"),
        (C, "10.0.0.3", 7000, "/models/m"),
    ]
    assert second.sources == ()


def sharers(state: State, known: Known, spec: InstanceSpec) -> list[list[tuple[NodeId, str, int, tuple[int, ...]]]]:
    ranks = place(spec, state, known, model()).layout.ranks
    return [[(one.node, one.host, one.port, one.ranks) for one in rank.sharers] for rank in ranks]


def test_nodes_that_all_lack_a_hubs_model_take_it_from_those_of_lower_ranks() -> None:
    state = state_of(a=20, b=20, c=20)
    first, second = (A, "10.0.0.1", 7000, (0,)), (B, "10.0.0.2", 7000, (1,))
    partly = HeldModel(model="org/model", path="/models/p", complete=False)
    known = Known(facts={A: facts_of(A, models=(partly,))})
    assert sharers(state, known, wish(3, nodes=(A, B, C))) == [[], [first], [first, second]]
    silent = State(nodes=state.nodes | {A: replaced(state.nodes[A], peer_port=0)})
    assert sharers(silent, known, wish(3, nodes=(A, B, C))) == [[], [], [second]]
    assert sharers(state, known, wish(3, nodes=(A, B, C), workload_model="/models/m")) == [[]] * 3
    held = HeldModel(model="org/model", path="/models/m")
    assert sharers(state, Known(facts={C: facts_of(C, models=(held,))}), wish(3, nodes=(A, B, C))) == [[]] * 3


def test_ranks_of_one_node_are_no_sharers_of_each_other_and_a_node_is_named_once() -> None:
    one, other = node("a", GIB), node("b", GIB)
    chooser = Chooser(Cluster(nodes=(one, other)), full_mesh("ab"))
    told = [_sharers_of(chooser, [one, other, one, other], rank) for rank in range(4)]
    assert [[(sharer.node, sharer.ranks) for sharer in sharers] for sharers in told] == [
        [],
        [(A, (0,))],
        [(B, (1,))],
        [(A, (0, 2))],
    ]


def test_of_many_nodes_rank_0_and_the_nearest_ranks_are_named() -> None:
    names = [NodeId(f"n{number:02}") for number in range(12)]
    state = state_of(**dict.fromkeys(names, 20))
    shared = sharers(state, Known(), wish(12, nodes=tuple(names), workload_sharding="pipeline"))
    assert [one[3] for one in shared[11]] == [(0,), *((rank,) for rank in range(4, 11))]
    assert max(map(len, shared)) == 8


def replaced(node_: Node, **fields: object) -> Node:
    info = msgspec.structs.replace(node_.info, **fields)
    return msgspec.structs.replace(node_, info=info)


def test_a_layout_of_an_older_log_names_no_sharers() -> None:
    old = msgspec.to_builtins(Layout(ranks=(RankLayout(memory_bytes=7),)))
    del old["ranks"][0]["sharers"]
    assert msgspec.convert(old, Layout).ranks[0].sharers == ()


def test_a_node_that_tells_one_address_only_is_enough_for_two_ranks() -> None:
    state = state_of(a=20)
    loopback = NodeAddress(host="127.0.0.1", network="127.0.0.0/8")
    info = msgspec.structs.replace(state.nodes[A].info, addresses=(loopback,), candidates=())
    alone = State(nodes={A: Node(info=info, since_ns=0)})
    found = place(wish(2), alone, Known(), model())
    assert [rank.next and rank.next.host for rank in found.layout.ranks] == ["127.0.0.1"] * 2


def test_without_knowledge_it_is_as_it_always_was() -> None:
    state = state_of(a=20, b=20)
    found = place(wish(2), state, weights_bytes=1000)
    assert found.layout.sharding == ""
    assert [rank.memory_bytes for rank in found.layout.ranks] == [MODEL_RANK_BYTES + 550] * 2


def test_the_error_has_the_kind_of_the_refusal() -> None:
    state = state_of(a=20, b=20, c=20)
    with pytest.raises(ShardingError, match="does not divide by 3"):
        place(wish(3, workload_sharding="tensor"), state, Known(), model())
    with pytest.raises(PlacementError, match="does not fit") as caught:
        place(wish(1), state_of(a=4), Known(), model())
    assert "Use a 8-bit version of this model; or start one more node" not in caught.value.remedy
    assert caught.value.remedy.startswith("Use a 4-bit version of this model")


def test_a_network_that_is_asked_for_is_the_only_one() -> None:
    state = state_of(a=20, b=20)
    assert isinstance(decide(wish(2, network="10.0.0.0/24"), state, Known(), model()), Placement)
    refused = decide(wish(2, network="192.168.7.0/24"), state, Known(), model())
    assert isinstance(refused, Refusal)
    assert "no network in common within 192.168.7.0/24" in refused.message


# --- again ------------------------------------------------------------------------------------------------------


def broken(state: State, **fields: object) -> Instance:
    whole = running(state, A, GIB, **fields).instances[InstanceId("i")]
    gone = msgspec.structs.replace(whole.ranks[0], state=Gone(1))
    failure = Failure(kind="node-lost", message="x")
    return msgspec.structs.replace(whole, ranks=(gone,), status=Broken(failure, 0))


def test_an_instance_that_chose_its_size_may_choose_again() -> None:
    small = state_of(b=4, c=4)
    again = place_again(broken(small, auto_ranks=True), small, Known())
    assert isinstance(again, Placement)
    assert len(again.assignments) == 2
    fixed = place_again(broken(small), small, Known())
    assert isinstance(fixed, Refusal)


def test_numbers_alone_make_no_other_refusal() -> None:
    def refusal(message: str, phase: Phase = Phase.PLACING) -> Failure:
        return Failure(kind="placement-refused", message=message, phase=phase)

    assert same_refusal(refusal("node a has 512 MiB left"), refusal("node a has 1.2 GiB left"))
    assert not same_refusal(refusal("node a has 512 MiB left"), refusal("node b has 512 MiB left"))
    assert not same_refusal(refusal("x"), refusal("x", Phase.LOADING))


def test_every_workload_counts_its_prompt_cache_as_far_as_it_can_fill() -> None:
    state = state_of(a=20)
    needs = model(12, kv=1024)
    bare, filled = (
        place(wish(1, workload_prompt_cache_bytes=size), state, Known(), needs).layout.ranks[0].memory_bytes
        for size in (0, 64 * MIB)
    )
    assert filled - bare == 64 * MIB
    assert isinstance(wish(1).workload, ModelWorkload)
    capped = wish(1, workload_prompt_cache_bytes=2**40, workload_context_tokens=256, workload_max_batch=1)
    least = wish(1, workload_prompt_cache_bytes=0, workload_context_tokens=256, workload_max_batch=1)
    both = [place(one, state, Known(), needs).layout.ranks[0].memory_bytes for one in (capped, least)]
    assert both[0] - both[1] == 12 * 1024 * 256


def test_devices_in_use_are_those_of_a_machine_whichever_of_its_nodes_has_the_ranks() -> None:
    """Also where the node that has them is lost: what runs there has not ended for that."""
    state = on_machine(on_machine(state_of(a=10, b=10, c=10, d=10), "one", A, C), "two", B, NodeId("d"))
    ranks = tuple(
        Rank(rank=number, node=name, boot="boot", state=Assigned(), since_ns=0) for number, name in ((0, A), (1, B))
    )
    layout = Layout(devices=((None, "rdma_en2"), ("rdma_en3", None)))
    busy = running(state, A, GIB)
    instance = msgspec.structs.replace(busy.instances[InstanceId("i")], backend="jaccl", ranks=ranks, layout=layout)
    lost = {A: msgspec.structs.replace(state.nodes[A], lost="pulled")}
    for nodes in (state.nodes, state.nodes | lost):
        found = cluster(State(nodes=nodes, instances={instance.id: instance})).in_use
        assert set(found.devices) == {("one", "rdma_en2"), ("two", "rdma_en3")}
        assert found.of(C, "rdma_en2").memory_regions == 96
        assert found.of(C, "rdma_en3").memory_regions == 0


def test_where_a_rank_computes_on_a_cpu_the_scores_of_attention_are_counted() -> None:
    """512 tokens of a prompt that look back at 8192 each, at 512 bytes for a pair: 2 GiB that a GPU does not take."""
    needs = msgspec.structs.replace(model(), plain_score_bytes=512)
    taken: list[int] = []
    for device in ("gpu", "cpu"):
        known = Known(facts={A: facts_of(A, os="Debian GNU/Linux", device=device)})
        found = decide(wish(1, workload_context_tokens=8192), state_of(a=64), known, needs)
        assert isinstance(found, Placement)
        taken.append(found.layout.ranks[0].memory_bytes)
    assert taken[1] - taken[0] == 512 * 8192 * 512
