"""A preview is what `create` would do, what else would do, and why not the rest; it changes nothing."""

from __future__ import annotations

import msgspec
from books import Books, create, info

from muster.bench.random_clusters import GIB, model, wish
from muster.coordinator.previews import preview
from muster.events import InstanceCreated, NodeJoined
from muster.known import Known
from muster.protocol import Create, Preview
from muster.replies import Created, Previewed, Refused


def books_of(**rooms: int) -> Books:
    books = Books()
    for name, gib in rooms.items():
        books.ledger.commit(NodeJoined(info=msgspec.structs.replace(info(name), memory_bytes=gib * GIB)))
    return books


def test_the_first_option_is_what_create_does() -> None:
    books = books_of(a=20, b=20)
    spec = wish(1, auto_ranks=True)
    before = books.ledger.state
    found = preview(books.ledger.state, Known(), Preview(spec=spec), model())
    assert isinstance(found, Previewed)
    assert books.ledger.state is before
    fitting = [option for option in found.options if not option.refusal]
    assert [(len(one.assignments), one.layout.sharding) for one in fitting] == [
        (1, "none"),
        (2, "tensor"),
        (2, "pipeline"),
    ]
    assert any("jaccl" in option.refusal for option in found.options)
    made = create(books.ledger, Create(spec=spec), model())
    assert isinstance(made, Created)
    (envelope,) = books.log.read(before.sequence, 1)
    event = envelope.event()
    assert isinstance(event, InstanceCreated)
    assert (event.assignments, event.layout) == (fitting[0].assignments, fitting[0].layout)
    assert (event.spec.ranks, event.spec.auto_ranks, event.spec.memory_bytes) == (1, True, None)


def test_the_chosen_number_of_ranks_is_what_is_logged() -> None:
    books = books_of(a=5, b=5)
    made = create(books.ledger, Create(spec=wish(1, auto_ranks=True)), model())
    assert isinstance(made, Created)
    instance = books.ledger.state.instances[made.instance]
    assert (instance.spec.ranks, len(instance.ranks), instance.needs) == (2, 2, model())


def test_what_does_not_fit_is_told_with_what_would() -> None:
    found = preview(books_of(a=5, b=5).ledger.state, Known(), Preview(spec=wish(1)), model())
    assert isinstance(found, Previewed)
    assert "does not fit on 1 rank(s)" in found.options[0].refusal
    assert not found.options[1].refusal
    assert "use --ranks 2" in found.remedies
    short = found.options[0].shortfalls
    assert [(one.node, one.what, one.available_bytes) for one in short] == [
        ("a", "memory", 5 * GIB),
        ("b", "memory", 5 * GIB),
    ]
    assert all(one.needed_bytes - one.available_bytes == one.missing_bytes > GIB for one in short)
    books = books_of(a=5, b=5)
    refused = create(books.ledger, Create(spec=wish(1)), model())
    assert isinstance(refused, Refused)
    assert refused.shortfalls == short
    assert any(not option.refusal for option in found.options)


def test_without_nodes_it_is_refused() -> None:
    found = preview(books_of().ledger.state, Known(), Preview(spec=wish(1)), model())
    assert isinstance(found, Refused)
    assert found.failure.message == "no node has joined"


def test_variables_that_belong_to_the_group_are_refused() -> None:
    for name in ("MLX_RANK", "JACCL_RING", ""):
        found = create(books_of(a=20).ledger, Create(spec=wish(1, environment={name: "1"})), model())
        assert isinstance(found, Refused)
        assert (found.failure.kind, name in found.failure.message) == ("request-invalid", True)
    fine = create(books_of(a=20).ledger, Create(spec=wish(1, environment={"MLX_METAL_FAST_SYNCH": "1"})), model())
    assert isinstance(fine, Created)
