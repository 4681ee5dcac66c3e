"""A request is accepted with an id, or refused with a reason, and a refused one changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from books import A, Books, create

from muster.coordinator.find import find
from muster.coordinator.intake import delete
from muster.errors import LogError, RequestError
from muster.events import InstanceCreated, InstanceReady
from muster.placement import MODEL_RANK_BYTES, RANK_BYTES
from muster.protocol import Create, Delete
from muster.replies import Accepted, Created, Refused
from muster.spec import (
    Deadlines,
    GroupWorkload,
    InstanceId,
    InstanceSpec,
    ModelWorkload,
    NodeId,
    Phase,
    ScriptWorkload,
    Workload,
)
from muster.state import Deleting, Instance

GROUP = InstanceSpec(workload=GroupWorkload(), ranks=2)


def created(books: Books, spec: InstanceSpec = GROUP, key: str = "") -> Created:
    answer = create(books.ledger, Create(spec=spec, key=key))
    assert isinstance(answer, Created), answer
    return answer


def refused(books: Books, spec: InstanceSpec) -> Refused:
    before = books.ledger.state
    answer = create(books.ledger, Create(spec=spec))
    assert isinstance(answer, Refused), answer
    assert books.ledger.state is before
    assert answer.failure.phase is Phase.PLACING
    return answer


def test_an_accepted_request_is_one_event_with_the_placement() -> None:
    books = Books("a", "b")
    answer = created(books)
    (envelope,) = books.log.read(2, 10)
    event = envelope.event()
    assert isinstance(event, InstanceCreated)
    assert (event.instance, envelope.sequence) == (answer.instance, answer.sequence)
    assert [item.node for item in event.assignments] == ["a", "b"]
    assert event.spec.memory_bytes == RANK_BYTES


def test_the_same_key_creates_once_and_no_key_creates_again() -> None:
    books = Books("a", "b")
    assert created(books, key="k") == created(books, key="k")
    assert created(books, key="l").instance != created(books).instance != created(books).instance
    assert len(books.ledger.state.instances) == 4


def test_a_refused_request_says_what_is_missing_where() -> None:
    books = Books("a")
    failure = refused(books, msgspec.structs.replace(GROUP, nodes=(A, NodeId("z")))).failure
    assert failure.kind == "placement-refused"
    assert "node z is unknown" in failure.message
    assert failure.remedy


def test_a_full_disk_refuses_without_a_trace() -> None:
    books = Books("a")
    books.log.full = True
    with pytest.raises(LogError):
        create(books.ledger, Create(spec=GROUP))
    assert books.ledger.state.instances == {}


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (ModelWorkload(model="  "), "the model is empty"),
        (ScriptWorkload(path=""), "path is empty"),
        (ScriptWorkload(path="x.py"), "'x.py' is relative"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(workload: Workload, message: str) -> None:
    failure = refused(Books("a"), InstanceSpec(workload=workload)).failure
    assert failure.kind == "request-invalid"
    assert message in failure.message


def test_a_home_that_nobody_has_is_refused_or_left_to_the_node() -> None:
    create(Books("a").ledger, Create(spec=InstanceSpec(workload=ModelWorkload(model="~no-such-user-here/model"))))


@pytest.mark.parametrize("model", ["/nowhere/model", "org/model", "x" * 5000, "a\0b", "."])
def test_a_model_that_this_machine_does_not_know_is_left_to_the_nodes(model: str) -> None:
    books = Books("a")
    answer = created(books, InstanceSpec(workload=ModelWorkload(model=model)))
    assert books.ledger.state.instances[answer.instance].spec.memory_bytes == MODEL_RANK_BYTES


def test_the_weights_count_where_they_are_seen() -> None:
    books = Books("a")
    spec = InstanceSpec(workload=ModelWorkload(model="/somewhere"), ranks=2)
    answer = create(books.ledger, Create(spec=spec), weights_bytes=1000)
    assert isinstance(answer, Created)
    assert books.ledger.state.instances[answer.instance].spec.memory_bytes == MODEL_RANK_BYTES + 550


@pytest.mark.parametrize(
    ("spec", "stem"),
    [
        (GROUP, "group"),
        (msgspec.structs.replace(GROUP, name="My Group!"), "my-group"),
        (InstanceSpec(workload=ModelWorkload(model="org/Qwen3-4B_x")), "qwen3-4b-x"),
        (InstanceSpec(workload=ScriptWorkload(path="/x/train.v2.py")), "train-v2"),
        (msgspec.structs.replace(GROUP, name="日本"), "instance"),
    ],
)
def test_an_id_begins_with_what_people_know_it_by(spec: InstanceSpec, stem: str) -> None:
    assert created(Books("a"), spec).instance.rpartition("-")[0] == stem


def test_a_name_is_given_once() -> None:
    books = Books("a")
    first = created(books, msgspec.structs.replace(GROUP, name="x"))
    failure = refused(books, msgspec.structs.replace(GROUP, name="x")).failure
    assert first.instance in failure.message


def test_an_instance_is_found_by_id_name_or_beginning() -> None:
    books = Books("a")
    one = created(books, msgspec.structs.replace(GROUP, name="alpha")).instance
    two = created(books).instance
    state = books.ledger.state
    for wanted, found in ((one, one), ("alpha", one), (two, two), (two[:7], two), ("gro", two)):
        assert find(state, wanted).id == found
    with pytest.raises(RequestError, match=f"the instances are: {one}, {two}"):
        find(state, "nothing")
    with pytest.raises(RequestError, match="there is no instance ''"):
        find(state, "")
    three = created(books).instance
    with pytest.raises(RequestError, match=f"may be any of {min(two, three)}, {max(two, three)}"):
        find(books.ledger.state, "group-")
    with pytest.raises(RequestError, match="the instances are: none"):
        find(Books().ledger.state, "x")


def test_deletion_begins_once() -> None:
    books = Books("a")
    instance = created(books).instance
    answer = delete(books.ledger, Delete(instance=instance))
    assert answer == Accepted(instance=instance, sequence=books.ledger.state.sequence)
    assert isinstance(books.ledger.state.instances[instance].status, Deleting)
    assert delete(books.ledger, Delete(instance=instance)) == answer
    missing = delete(books.ledger, Delete(instance="nothing"))
    assert isinstance(missing, Refused)
    assert missing.failure.kind == "request-invalid"


def ready_model(books: Books) -> Instance:
    """A model that is ready."""
    spec = InstanceSpec(workload=ModelWorkload(model="/m"), ranks=1, deadlines=Deadlines(drain_seconds=7))
    name = created(books, spec).instance
    books.ledger.commit(InstanceReady(instance=name, attempt=1))
    return books.ledger.state.instances[name]


def deleting(books: Books, name: str, *, now: bool = False) -> Deleting:
    """What the instance is after a further `Delete`."""
    assert isinstance(delete(books.ledger, Delete(instance=name, now=now)), Accepted)
    status = books.ledger.state.instances[InstanceId(name)].status
    assert isinstance(status, Deleting)
    return status


def test_a_ready_model_drains_and_a_second_request_may_hurry_it() -> None:
    books = Books("a")
    name = ready_model(books).id
    assert deleting(books, name) == Deleting(7.0)
    head = books.ledger.state.sequence
    assert deleting(books, name) == Deleting(7.0)
    assert books.ledger.state.sequence == head
    assert deleting(books, name, now=True) == Deleting(0.0)
    assert books.ledger.state.sequence == head + 1
    assert deleting(books, name) == Deleting(0.0)
    assert books.ledger.state.sequence == head + 1


def test_what_has_begun_nothing_does_not_drain() -> None:
    books = Books("a", "b")
    model = created(books, InstanceSpec(workload=ModelWorkload(model="/m"), ranks=1)).instance
    group = created(books).instance
    books.ledger.commit(InstanceReady(instance=group, attempt=1))
    assert [deleting(books, name) for name in (model, group)] == [Deleting(0.0)] * 2
    other = ready_model(books).id
    assert deleting(books, other, now=True) == Deleting(0.0)
