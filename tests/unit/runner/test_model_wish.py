"""What a rank asks for when it obtains its model, from the layout and its instance."""

from __future__ import annotations

import pytest

from muster.layout import Layout, ModelSource, RankLayout, Sharer
from muster.rank_protocol import Prepare
from muster.runner.context import RankContext
from muster.runner.model_rank import ModelRank
from muster.spec import InstanceId, ModelWorkload, NodeId

SOURCE = ModelSource(node=NodeId("c"), host="10.0.0.3", port=7, path="/m")
SHARER = Sharer(node=NodeId("a"), host="10.0.0.1", port=7, ranks=(0,))
LAYOUT = Layout(ranks=(RankLayout(), RankLayout(sources=(SOURCE,), sharers=(SHARER,))))


def asked(
    rank: int = 1, layout: Layout = LAYOUT, environment: dict[str, str] | None = None
) -> tuple[tuple[ModelSource, ...], tuple[Sharer, ...]]:
    workload = ModelWorkload(model="owner/name")
    prepare = Prepare(
        instance=InstanceId("i"),
        attempt=1,
        rank=rank,
        world_size=2,
        workload=workload,
        host="",
        directory="",
        generation="",
        shared_seconds=1.0,
        layout=layout,
        environment=environment or {},
    )
    made = ModelRank(RankContext(None, prepare), workload)  # pyright: ignore[reportArgumentType]
    try:
        wish = made._wish()
    finally:
        made._zmq.term()
    return wish.sources, wish.sharers


def test_a_rank_takes_from_those_that_its_layout_names() -> None:
    assert asked() == ((SOURCE,), (SHARER,))
    assert asked(rank=0) == ((), ())
    assert asked(layout=Layout()) == ((), ())


@pytest.mark.parametrize("name", ["HF_HOME", "HF_HUB_CACHE"])
def test_ranks_with_a_cache_of_their_own_do_not_wait_for_what_no_worker_sees(name: str) -> None:
    assert asked(environment={name: "/elsewhere"}) == ((SOURCE,), ())
    assert asked(environment={"HF_TOKEN": "x"}) == ((SOURCE,), (SHARER,))
