"""The bed itself: what its verbs do to packets, processes, disks and clocks, and that nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import bed_kernel
import psutil
import pytest
from bed import Bed
from bed_faults import Way
from bed_kernel import BedError

pytestmark = [pytest.mark.netns, pytest.mark.process]

_DIAL = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2]))"
_LISTEN = "import socket, sys, time; s = socket.create_server((sys.argv[1], 7)); print(flush=True); time.sleep(600)"
#: Sends so many datagrams of a size, as fast as they are taken.
_SPRAY = """if True:
    import socket, sys
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(int(sys.argv[2])):
        s.sendto(bytes(int(sys.argv[3])), (sys.argv[1], 9))
"""
#: Counts datagrams; says so when it can, and at each line on stdin how many came since the last.
_COUNT = """if True:
    import socket, sys
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, 33, 16_000_000)  # SO_RCVBUFFORCE
    s.bind(("", 9))
    s.setblocking(False)
    print(flush=True)
    for _ in sys.stdin:
        count = 0
        try:
            while s.recv(65536):
                count += 1
        except BlockingIOError:
            print(count, flush=True)
"""
_TIMES = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.time_ns(), time.monotonic(), flush=True)"


class Speaker:
    """A process that answers each line with a line."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.stdin: IO[bytes] = process.stdin
        self.stdout: IO[bytes] = process.stdout

    def ask(self) -> list[float]:
        """The numbers of its answer."""
        self.stdin.write(b"\n")
        self.stdin.flush()
        return [float(word) for word in self.stdout.readline().split()]


@contextmanager
def speaker(hosts: Bed, host: str, script: str) -> Generator[Speaker]:
    process = hosts.run(host, sys.executable, "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Speaker(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Bed]:
    with Bed(hosts=2, bridges=2, clocks=True) as made:
        for bridge in made.bridges:
            listener = made.run("h1", sys.executable, "-c", _LISTEN, made.address("h1", bridge), stdout=subprocess.PIPE)
            assert listener.stdout is not None
            with listener.stdout:
                listener.stdout.readline()
        yield made


@pytest.fixture(scope="module")
def counter(hosts: Bed) -> Iterator[Speaker]:
    with speaker(hosts, "h1", _COUNT) as counting:
        counting.stdout.readline()
        yield counting


@pytest.fixture(autouse=True)
def mended(hosts: Bed) -> Iterator[None]:
    yield
    hosts.mend()


def dial(hosts: Bed, bridge: int, seconds: float, *, to: str = "h1") -> str:
    """Connect to a host from the other; the error's last line, empty where it worked."""
    other = "h0" if to == "h1" else "h1"
    address = hosts.address(to, bridge)
    dialler = hosts.run(other, sys.executable, "-c", _DIAL, address, str(seconds), stderr=subprocess.PIPE)
    lines = dialler.communicate()[1].decode().splitlines()
    return lines[-1] if lines else ""


def spray(hosts: Bed, counter: Speaker, count: int, expected: int, size: int = 1) -> int:
    """Send datagrams from h0 to h1 over bridge 0; how many arrived, once so many or more did, or after two seconds."""
    sender = hosts.run("h0", sys.executable, "-c", _SPRAY, hosts.address("h1"), str(count), str(size))
    assert sender.wait(20) == 0
    deadline = time.monotonic() + 2
    arrived = sum(counter.ask())
    while arrived < expected and time.monotonic() < deadline:
        arrived += sum(counter.ask())
    return int(arrived)


def need(hosts: Bed, verb: Literal["drop", "limit"]) -> None:
    """Skip where the kernel cannot."""
    if reason := hosts.refusal(verb):
        pytest.skip(reason)


# --- links --------------------------------------------------------------------------------------------------


def test_hosts_reach_each_other_over_every_bridge(hosts: Bed) -> None:
    assert [dial(hosts, bridge, 5) for bridge in hosts.bridges] == ["", ""]


def test_a_cut_link_carries_nothing_until_it_is_healed_and_the_other_link_is_untouched(hosts: Bed) -> None:
    hosts.cut("h1", 0)
    assert "timed out" in dial(hosts, 0, 0.3)
    assert dial(hosts, 1, 5) == ""
    hosts.heal("h1", 0)
    assert dial(hosts, 0, 5) == ""


def test_a_host_whose_interface_is_off_has_no_route(hosts: Bed) -> None:
    hosts.take_down("h0", 1)
    assert "unreachable" in dial(hosts, 1, 5)
    hosts.bring_up("h0", 1)
    assert dial(hosts, 1, 5) == ""


@pytest.mark.parametrize(("way", "arrived"), [("from", 20), ("to", 0)])
def test_a_link_cut_one_way_carries_the_other(hosts: Bed, counter: Speaker, way: Way, arrived: int) -> None:
    need(hosts, "drop")
    assert spray(hosts, counter, 20, 20) == 20  # neighbours are known from here on: no packet waits for ARP
    hosts.cut("h1", way=way)
    assert spray(hosts, counter, 20, arrived) == arrived
    assert "timed out" in dial(hosts, 0, 0.3)
    hosts.heal("h1")
    assert spray(hosts, counter, 20, 20) == 20


def test_a_share_of_the_packets_is_dropped(hosts: Bed, counter: Speaker) -> None:
    need(hosts, "drop")
    assert spray(hosts, counter, 1, 1) == 1
    hosts.drop("h1", 0.5, way="to")
    # 200 of 400 with a standard deviation of 10: chance fails this once in 10^15 runs.
    assert 120 < spray(hosts, counter, 400, 121) < 280
    hosts.drop("h1", 0.0)
    assert spray(hosts, counter, 400, 400) == 400
    with pytest.raises(BedError, match=r"share is 1\.5; it must be from 0 to 1"):
        hosts.drop("h1", 1.5)


@pytest.mark.parametrize(("way", "host"), [("from", "h0"), ("to", "h1"), ("both", "h1")])
def test_a_limited_link_is_that_slow(hosts: Bed, counter: Speaker, way: Way, host: str) -> None:
    need(hosts, "limit")
    assert spray(hosts, counter, 1, 1) == 1
    hosts.limit(host, 1_000_000, way=way)
    # 3.2 Mbit at once: 0.13 pass, 0.4 wait for their turn, the rest is lost.
    assert spray(hosts, counter, 400, 0, size=1_000) < 200
    hosts.heal(host)
    counter.ask()
    assert spray(hosts, counter, 100, 100) == 100


def test_mending_undoes_everything(hosts: Bed) -> None:
    need(hosts, "drop")
    hosts.cut("h0", 0)
    hosts.cut("h1", 0, "to")
    hosts.take_down("h1", 1)
    sleeper = hosts.run("h0", "sleep", "600")
    hosts.stop("h0", sleeper.pid)
    hosts.jump("h0", 3600)
    hosts.mend()
    assert [dial(hosts, bridge, 5) for bridge in hosts.bridges] == ["", ""]
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED
    with speaker(hosts, "h0", _TIMES) as clock:
        assert clock.ask()[0] < time.time()


# --- processes, disks, clocks -------------------------------------------------------------------------------


def test_a_process_is_stopped_continued_and_killed_only_on_its_own_host(hosts: Bed) -> None:
    with speaker(hosts, "h0", _TIMES) as process:
        pid = process.process.pid
        process.ask()
        with pytest.raises(BedError, match=f"process {pid} is not on h1"):
            hosts.stop("h1", pid)
        hosts.stop("h0", pid)
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        hosts.proceed("h0", pid)
        assert process.ask()
        hosts.kill("h0", pid)
        assert process.process.wait(5) == -signal.SIGKILL
        hosts.proceed("h0", pid)


def test_a_full_disk_takes_nothing_until_it_is_freed(hosts: Bed, tmp_path: Path) -> None:
    write = ("sh", "-c", f"head -c 100000 /dev/zero > {tmp_path}/disk/file")
    hosts.disk("h0", tmp_path / "disk", 1_000_000)
    assert hosts.run("h0", *write).wait(5) == 0
    (tmp_path / "disk" / "file").unlink()
    hosts.fill("h0")
    assert hosts.run("h0", *write, stderr=subprocess.DEVNULL).wait(5) != 0
    hosts.free("h0")
    assert hosts.run("h0", *write).wait(5) == 0
    with pytest.raises(BedError, match="h0 has a disk at"):
        hosts.disk("h0", tmp_path, 1)


def test_a_clock_jumps_for_the_processes_of_its_host_and_for_their_wall_clock_only(hosts: Bed) -> None:
    with speaker(hosts, "h0", _TIMES) as jumping, speaker(hosts, "h1", _TIMES) as other:
        before = jumping.ask()
        hosts.jump("h0", 3600)
        hosts.jump("h0", -60)
        after, there = jumping.ask(), other.ask()
        assert 3540 <= after[0] - before[0] < 3560
        assert 3540 <= (after[1] - before[1]) / 1e9 < 3560
        assert after[2] - before[2] < 20
        assert there[0] - before[0] < 20
        with speaker(hosts, "h0", _TIMES) as later:
            assert later.ask()[0] - before[0] >= 3540


# --- nothing stays ------------------------------------------------------------------------------------------


def test_closing_a_bed_ends_what_runs_on_it_and_removes_it(tmp_path: Path) -> None:
    with Bed(hosts=1, clocks=True) as made:
        made.disk("h0", tmp_path / "disk", 100_000)
        process = made.run("h0", "sleep", "600")
        assert process.pid in made.pids("h0")
        with pytest.raises(BedError, match="make the bed with clocks=True"):
            Bed(hosts=1).jump("h0", 1)
        prefix = made._prefix
    assert process.poll() is not None
    assert left_of(prefix) == set()


def test_the_bed_of_a_dead_run_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    script = f"""if True:
        import os, subprocess, bed
        from pathlib import Path
        made = bed.Bed(hosts=1, clocks=True)
        made._make()
        made.disk("h0", Path({str(tmp_path / "a disk")!r}), 100_000)
        made.run("h0", "sleep", "600", stdout=subprocess.DEVNULL)
        print(made._prefix, flush=True)
        os._exit(0)
    """
    with Bed(hosts=1) as living:
        sleeper = living.run("h0", "sleep", "600")
        command = [sys.executable, "-c", script]
        died = subprocess.run(command, check=True, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
        prefix = died.stdout.strip()
        parts = {f"{prefix}-{place}" for place in ("h0", "switch", "files")}
        assert left_of(prefix) == parts
        assert parts <= set(bed_kernel.sweep())
        assert left_of(prefix) == set()
        assert sleeper.pid in living.pids("h0")


def left_of(prefix: str) -> set[str]:
    """The namespaces, mounts and files of a bed."""
    return {
        *(name for name in bed_kernel.command("ip", "netns", "list").split() if name.startswith(prefix)),
        *(source for source, _ in bed_kernel.mounts_of(prefix)),
        *(path.name for path in bed_kernel.RUN.glob(f"{prefix}*")),
    }
