"""The doctor's probes of its own machine: late, broken and missing ones are findings, and nothing raises."""

from __future__ import annotations

import http.server
import io
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from patients import linux, mac
from rich.console import Console

from muster.cli.render_doctor import checks_table, summary
from muster.doctor.checks import Check, Verdict, failure, merged, of_node, ok, warning
from muster.doctor.examination import check_local
from muster.doctor.findings import (
    Examined,
    Hub,
    MlxTried,
    Range,
    Used,
    check_directory,
    check_hub,
    check_local_network,
    check_mlx,
    check_ports,
    check_range,
)
from muster.doctor.local import (
    Probe,
    local_facts,
    send_to,
    try_directory,
    try_hub,
    try_range,
    used_ports,
)
from muster.facts import Rdma
from muster.group.ports import reserve
from muster.probe.collect import Subject
from muster.spec import NodeId

PORTS = (5710, 5711)


def test_a_probe_that_raises_or_is_late_gives_the_reason() -> None:
    def broken() -> int:
        raise OSError("no such device")

    released = threading.Event()
    assert Probe("disk", 5, broken).result() == "disk: OSError: no such device"
    assert Probe("hub", 0.01, released.wait).result() == "hub: no answer within 0.01 s"
    released.set()
    assert Probe("sum", 5, lambda: 3).result() == 3


def test_a_machine_on_which_every_probe_failed_is_still_reported() -> None:
    checks = check_local(
        Examined(facts="facts: broken", mlx="MLX: late", ports="ports: late", hub="hub: late", range="")
    )
    assert [(check.name, check.verdict.value) for check in checks] == [
        ("facts", "FAILURE"),
        ("mlx runs", "FAILURE"),
        ("ports", "WARNING"),
        ("worker ports", "WARNING"),
        ("hub", "WARNING"),
    ]


def only(checks: Iterator[Check]) -> tuple[Verdict, str]:
    (check,) = checks
    return check.verdict, check.evidence


@pytest.mark.parametrize(
    ("checks", "verdict", "evidence"),
    [
        (check_mlx(MlxTried(device="Device(gpu, 0)"), linux()), Verdict.OK, "on the GPU"),
        (check_mlx(MlxTried(device="Device(cpu, 0)"), linux()), Verdict.WARNING, "although there is RTX 4090"),
        (check_mlx(MlxTried(device="Device(cpu, 0)"), linux(gpus=())), Verdict.OK, "on the CPU"),
        (check_mlx(MlxTried(error="ImportError: libmlx.so"), linux()), Verdict.FAILURE, "ImportError: libmlx.so"),
        (check_directory("/x may not be written"), Verdict.FAILURE, "/x"),
        (check_local_network(""), Verdict.OK, "lets this program send"),
        (check_local_network("No route to host"), Verdict.FAILURE, "No route to host"),
        (check_local_network("Network is unreachable"), Verdict.WARNING, "Network is unreachable"),
        (check_ports((), PORTS), Verdict.OK, "5710-5711 are free"),
        (check_ports((Used(port=5710, pid=7, name="python", ours=True),), PORTS), Verdict.OK, "used by muster, pid 7"),
        (check_ports((Used(port=5711, pid=8, name="nginx"),), PORTS), Verdict.WARNING, "5711 by nginx (pid 8)"),
        (check_ports((Used(port=5711),), PORTS), Verdict.WARNING, "another user's process"),
        (check_range(Range(first=1, last=9, tried=9, free=0)), Verdict.FAILURE, "0 of 9"),
        (check_range(Range(first=1, last=9, tried=9, free=3)), Verdict.WARNING, "3 of 9"),
        (check_range(Range(first=1, last=99, tried=99, free=99)), Verdict.OK, "99 of 99"),
        (check_hub(Hub(endpoint="http://hub", offline=True)), Verdict.OK, "offline"),
        (check_hub(Hub(endpoint="http://hub", status=401)), Verdict.OK, "http://hub answers"),
        (check_hub(Hub(endpoint="http://hub", status=503)), Verdict.WARNING, "503"),
        (check_hub(Hub(endpoint="http://hub", error="timed out")), Verdict.WARNING, "timed out"),
    ],
)
def test_what_the_probes_find_is_judged(checks: Iterator[Check], verdict: Verdict, evidence: str) -> None:
    found, text = only(checks)
    assert (found, evidence in text) == (verdict, True), text


def test_a_backend_of_another_version_than_mlx_is_a_failure() -> None:
    tried = MlxTried(device="Device(cpu, 0)", wheels={"mlx-cpu": "0.31.0"})
    wheel, _ = check_mlx(tried, linux(gpus=()))
    assert (wheel.verdict, wheel.evidence) == (
        Verdict.FAILURE,
        "mlx 0.32.4 with mlx-cpu 0.31.0: they belong together",
    )
    assert "mlx-cpu==0.32.4" in wheel.help


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "deep" / "down"))
    assert try_directory() == ""
    (tmp_path / "deep").write_text("a file")
    assert "is no directory" in try_directory()


def test_the_disks_of_copies_and_of_the_hubs_cache_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def collect(subject: Subject) -> None:
        looked.extend(subject.directories)

    monkeypatch.setattr("muster.doctor.local.collect", collect)
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    local_facts(MlxTried())
    local_facts(MlxTried(), tmp_path / "copies")
    home, cache = tmp_path / "home", tmp_path / "elsewhere"
    assert looked == [home, home / "models", cache, home, tmp_path / "copies", cache]


def test_what_was_tried_of_the_local_network_stands_in_the_place_of_what_macos_asks() -> None:
    network = [
        [check for check in check_local(Examined(facts=mac(), mlx="", ports=(), local_network=tried)) if check.help]
        for tried in (None, "No route to host")
    ]
    asked, tried = ([check for check in checks if check.name == "local network"] for checks in network)
    assert [check.verdict for check in (*asked, *tried)] == [Verdict.OK, Verdict.FAILURE]


def test_a_packet_that_may_not_be_sent_gives_the_reason() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        assert send_to(receiver.getsockname()) == ""
        receiver.settimeout(10)
        assert receiver.recv(100) == bytes(12)
    assert send_to(("255.255.255.255", 9)) == "Permission denied", "a broadcast, which was not asked for"


@pytest.mark.parametrize("root", [True, False], ids=["as root", "as a user of a Mac"])
def test_a_port_that_somebody_listens_on_is_seen(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> NoReturn:
        raise psutil.AccessDenied(msg=f"no {kind} for you")

    if not root:
        monkeypatch.setattr(psutil, "net_connections", denied)
        monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process()])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        (used,) = used_ports([port])
    assert (used.port, used.pid) == (port, os.getpid())
    with reserve("127.0.0.1") as free:
        assert try_range(free.port, free.port).tried == 1


@pytest.fixture
def hub() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_hub_is_asked_only_where_it_may_be(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    assert try_hub(2.0) == Hub(endpoint=hub, status=404)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert try_hub(2.0).offline
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with reserve("127.0.0.1") as closed:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.port}")
        assert "refused" in try_hub(2.0).error


# --- what is shown ------------------------------------------------------------------------------------------------


def shown(checks: tuple[Check, ...], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(checks_table(checks, width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


CHECKS = (
    ok("python", "Python 3.12.4"),
    warning("sleep", "the machine sleeps after 10 min: its ranks are lost then", "sudo pmset -a sleep 0"),
    failure("rdma", "rdma_ctl says enabled, but ibv_devices shows no device", "sudo reboot"),
)


def test_a_narrow_table_has_the_help_below() -> None:
    assert shown(CHECKS, 70) == (
        "VERDICT  CHECK   EVIDENCE\n"
        "OK       python  Python 3.12.4\n"
        "WARNING  sleep   the machine sleeps after 10 min: its ranks are lost\n"
        "                 then\n"
        "                 → sudo pmset -a sleep 0\n"
        "FAILURE  rdma    rdma_ctl says enabled, but ibv_devices shows no\n"
        "                 device\n"
        "                 → sudo reboot\n"
    )
    assert summary(CHECKS) == "1 failure, 1 warning, 1 OK"


def test_a_wide_table_of_a_cluster_has_nodes_and_help_beside() -> None:
    checks = merged([*of_node(NodeId("a"), CHECKS[:2]), *of_node(NodeId("b"), CHECKS[:1]), CHECKS[2]])
    lines = shown(checks, 160).splitlines()
    assert lines[0].split() == ["VERDICT", "CHECK", "NODES", "EVIDENCE", "HELP"]
    assert lines[1].startswith("FAILURE")
    assert lines[1].endswith("sudo reboot")
    assert lines[2].split()[:3] == ["WARNING", "sleep", "a"]
    assert lines[3].split() == ["OK", "python", "a,", "b", "Python", "3.12.4"]


def test_a_whole_machine_is_shown_as_ever() -> None:
    """A snapshot: what differs is shown, and copied into the file where it is meant."""
    ill = mac(rdma=Rdma(enabled=False), memory_pressure="warning", unknown={"system.clock_synchronised": "not told"})
    mlx, hub = MlxTried(device="Device(gpu, 0)"), Hub(endpoint="http://hub.test", offline=True)
    found = [shown(check_local(Examined(facts=facts, mlx=mlx, ports=(), hub=hub)), 100) for facts in (ill, linux())]
    assert "\n".join(found) == Path(__file__).with_name("doctor.txt").read_text()
