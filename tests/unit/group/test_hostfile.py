"""mlx.launch's hostfile: what is read is what is written, mlx's own reader agrees, and every mistake is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.errors import RequestError
from muster.group.hostfile import FileBackend, Host, Hostfile, Row, parse, write

RING = {"hosts": [{"ssh": "mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2", "ips": ["10.0.0.2"]}], "backend": "ring"}
JACCL = {
    "backend": "jaccl",
    "envs": ["MLX_METAL_FAST_SYNCH=1"],
    "hosts": [
        {"ssh": "mac1", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2", "rdma_en3"]},
        {"ssh": "mac2", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None, "rdma_en4"]},
        {"ssh": "mac3", "ips": [], "rdma": ["rdma_en2", ["rdma_en3", "rdma_en5"], None]},
    ],
}

#: Few are enough for so small a format, and other tests may have the machine meanwhile.
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

names = st.text("abcdefghij0123456789-._@ü", min_size=1, max_size=12)
ips = st.integers(1, 2**32 - 2).map(lambda n: ".".join(str(n >> shift & 255) for shift in (24, 16, 8, 0)))
variables = st.text("ABCXYZ_", min_size=1, max_size=8).filter(lambda name: not name.startswith(("MLX", "JACCL")))
values = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
device = st.integers(2, 9).map("rdma_en{}".format)
entry = st.one_of(device, st.lists(device, min_size=1, max_size=3, unique=True).map(tuple))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names | ips | device,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("ssh", "ips", "rdma", "node", "hosts", "backend", "envs", "x")), inner)
    ),
    max_leaves=20,
)


@FEW
@given(anything)
def test_whatever_the_file_has_it_is_read_or_refused(document: object) -> None:
    try:
        found = parse(json.dumps(document))
    except RequestError as error:
        assert error.remedy
    else:
        assert parse(write(found)) == found


@st.composite
def hostfiles(draw: st.DrawFn) -> Hostfile:
    size = draw(st.integers(1, 6))
    backend: FileBackend = draw(st.sampled_from(("", "ring", "jaccl", "jaccl-ring")))
    links = draw(st.integers(1, 3))
    hosts: list[Host] = []
    for rank in range(size):
        row: Row = ()
        if backend.startswith("jaccl"):
            near = {(rank - 1) % size, (rank + 1) % size} if backend == "jaccl-ring" else set(range(size))
            row = tuple(draw(entry) if other in near - {rank} else None for other in range(size))
        own = draw(st.lists(ips, min_size=links, max_size=links, unique=True))
        node = draw(st.sampled_from(("", "n1", "mac-2")))
        hosts.append(Host(ssh=draw(names), ips=tuple(own), rdma=row, node=node))
    environment = draw(st.dictionaries(variables, values, max_size=3))
    return Hostfile(hosts=tuple(hosts), backend=backend, environment=environment)


@FEW
@given(hostfiles())
def test_what_is_written_is_read_again(hostfile: Hostfile) -> None:
    assert parse(write(hostfile)) == hostfile


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@FEW
@given(hostfile=hostfiles())
def test_the_reader_of_mlx_reads_the_same(tmp_path_factory: pytest.TempPathFactory, hostfile: Hostfile) -> None:
    from mlx._distributed_utils.common import Hostfile as Theirs  # leaves its file open

    path = tmp_path_factory.getbasetemp() / "hostfile.json"
    path.write_text(write(hostfile))
    read: Any = Theirs.from_file(str(path))
    assert (read.backend, read.envs) == (hostfile.backend, [f"{k}={v}" for k, v in hostfile.environment.items()])
    for host, theirs in zip(hostfile.hosts, read.hosts, strict=True):
        assert (theirs.ssh_hostname, tuple(theirs.ips)) == (host.ssh, host.ips)
        assert tuple(tuple(entry) if isinstance(entry, list) else entry for entry in theirs.rdma) == host.rdma


def test_the_list_form_leaves_the_backend_open() -> None:
    found = parse(json.dumps(RING["hosts"]))
    assert found == Hostfile(hosts=(Host(ssh="mac1", ips=("10.0.0.1",)), Host(ssh="mac2", ips=("10.0.0.2",))))


def test_a_jaccl_file_has_devices_and_variables() -> None:
    found = parse(json.dumps(JACCL))
    assert found.environment == {"MLX_METAL_FAST_SYNCH": "1"}
    assert found.devices[2] == ("rdma_en2", ("rdma_en3", "rdma_en5"), None)


def changed(base: dict[str, Any], change: dict[str, Any], host: int | None = None) -> str:
    """The file with some keys set, of one host or of the whole."""
    copy: dict[str, Any] = json.loads(json.dumps(base))
    (copy if host is None else copy["hosts"][host]).update(change)
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("{", "", "no JSON"),
        ("3", "", "is 3"),
        ("[" * 100_000, "", "no JSON"),
        ('[{"ssh": "\\ud800"}]', "", "no JSON"),
        ("{}", "hosts", "hosts is missing"),
        ("[]", "hosts", "0 entries"),
        ('[["10.0.0.1:5000"]]', "hosts[0]", "is a list"),
        ('["mac1"]', "hosts[0]", '"mac1"'),
        ('[{"ips": ["10.0.0.1"]}]', "hosts[0].ssh", "has no ssh"),
        ('[{"ssh": null}]', "hosts[0].ssh", "null"),
        (changed(RING, {"host": []}), "host", "unknown key 'host'"),
        (changed(RING, {"ip": "10.0.0.1"}, 1), "hosts[1].ip", "hosts[1] has the unknown key 'ip'"),
        (changed(RING, {"backend": "mpi"}), "backend", "'mpi'"),
        (changed(RING, {"backend": 3}), "backend", "is 3"),
        (changed(RING, {"envs": {"A": "1"}}), "envs", '{"A": "1"}'),
        (changed(RING, {"envs": ["1A=2"]}), "envs[0]", '"1A=2"'),
        (changed(RING, {"envs": ["A=1", "A=2"]}), "envs[1]", "a second time"),
        (changed(RING, {"envs": ["MLX_RANK=0"]}), "envs[0]", "MLX_RANK"),
        (changed(RING, {"envs": ["MLX_JACCL_RING=1"]}), "envs[0]", "MLX_JACCL_RING"),
        (changed(RING, {"ssh": 3}, 1), "hosts[1].ssh", "is 3"),
        (changed(RING, {"ips": []}, 1), "hosts[1].ips", "host mac2 has no address"),
        (changed(RING, {"ips": "10.0.0.2"}, 1), "hosts[1].ips", '"10.0.0.2"'),
        (changed(RING, {"ips": ["fe80::1"]}, 1), "hosts[1].ips[0]", "no IPv4"),
        (changed(RING, {"ips": ["10.0.0.2:5000"]}, 1), "hosts[1].ips[0]", "no IPv4"),
        (changed(RING, {"ips": ["10.0.0.2", "10.0.0.2"]}, 1), "hosts[1].ips", "twice"),
        (changed(RING, {"ips": ["10.0.0.2", "10.0.1.2"]}, 1), "hosts[1].ips", "has 2 addresses, hosts[0].ips has 1"),
        (changed(RING, {"rdma": [None]}, 1), "hosts[0].rdma", "0 entries for 2 hosts"),
        (changed(JACCL, {"rdma": [None, "rdma_en2"]}, 0), "hosts[0].rdma", "2 entries for 3 hosts"),
        (changed(JACCL, {"rdma": "rdma_en2"}, 0), "hosts[0].rdma", '"rdma_en2"'),
        (changed(JACCL, {"rdma": ["a", "b", "c"]}, 0), "hosts[0].rdma[0]", "from mac1 to itself"),
        (changed(JACCL, {"rdma": [None, "a", None]}, 0), "hosts[0].rdma[2]", "from mac1 to mac3"),
        (changed(JACCL, {"rdma": [None, [], "a"]}, 0), "hosts[0].rdma[1]", "is []"),
        (changed(JACCL, {"rdma": [None, 3, "a"]}, 0), "hosts[0].rdma[1]", "is 3"),
        (changed(JACCL, {"rdma": [None, "en 2", "a"]}, 0), "hosts[0].rdma[1]", '"en 2"'),
        (changed(JACCL, {"rdma": [None, ["a", ""], "a"]}, 0), "hosts[0].rdma[1]", '["a", ""]'),
        (changed(JACCL, {"ips": []}, 0), "hosts[0].ips", "reach rank 0"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, field: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(text)
    assert (caught.value.field, bool(caught.value.remedy)) == (field, True)
    assert message in caught.value.message


def test_a_ring_of_wires_needs_devices_to_neighbours_only() -> None:
    rows = [[None, "a", None, "b"], ["a", None, "b", None], [None, "a", None, "b"], ["a", None, "b", None]]
    hosts = [{"ssh": f"m{i}", "ips": [f"10.0.0.{i + 1}"], "rdma": row} for i, row in enumerate(rows)]
    assert parse(json.dumps({"backend": "jaccl-ring", "hosts": hosts})).backend == "jaccl-ring"
    cut = [*hosts[:3], {**hosts[3], "rdma": [None, None, "b", None]}]
    with pytest.raises(RequestError, match="from m3 to m0"):
        parse(json.dumps({"backend": "jaccl-ring", "hosts": cut}))
    with pytest.raises(RequestError, match="from m0 to m2") as caught:
        parse(json.dumps({"backend": "jaccl", "hosts": hosts}))
    assert "jaccl-ring" in caught.value.remedy
