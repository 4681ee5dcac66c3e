"""What nodes tell counts for the boot that is there, and for the coordinator that asked."""

from __future__ import annotations

import pytest
from books import A, Books

from muster.coordinator.knowledge import Knowledge
from muster.links import NodeLinks
from muster.spec import BootId


@pytest.mark.parametrize(("told", "counts"), [(1, 1), (2, 2), (3, 0)])
def test_a_measuring_round_of_another_coordinator_answers_none_here(told: int, counts: int) -> None:
    knowledge, state = Knowledge(), Books("a").ledger.state
    knowledge.measure_round = 2
    knowledge.tell_links(NodeLinks(node=A, boot=state.nodes[A].info.boot, round=told), state)
    assert knowledge.known(state).links[A].round == counts


def test_what_another_boot_measured_is_not_taken() -> None:
    knowledge, state = Knowledge(), Books("a").ledger.state
    knowledge.tell_links(NodeLinks(node=A, boot=BootId("other")), state)
    assert knowledge.links == {}
