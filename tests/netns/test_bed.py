"""The bed itself: what its verbs do to packets, and that nothing of it stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bed
import pytest
from bed import Bed

pytestmark = [pytest.mark.netns, pytest.mark.process]

_DIAL = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2]))"
_LISTEN = "import socket, sys, time; s = socket.create_server((sys.argv[1], 7)); print(flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Bed]:
    with Bed(hosts=2, bridges=2) as made:
        for bridge in made.bridges:
            listener = made.run("h1", sys.executable, "-c", _LISTEN, made.address("h1", bridge), stdout=subprocess.PIPE)
            assert listener.stdout is not None
            with listener.stdout:
                listener.stdout.readline()
        yield made


def dial(hosts: Bed, bridge: int, seconds: float) -> str:
    """Connect from h0 to h1; the error's last line, empty where it worked."""
    address = hosts.address("h1", bridge)
    dialler = hosts.run("h0", sys.executable, "-c", _DIAL, address, str(seconds), stderr=subprocess.PIPE)
    lines = dialler.communicate()[1].decode().splitlines()
    return lines[-1] if lines else ""


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


def test_closing_a_bed_ends_what_runs_on_it_and_removes_it() -> None:
    with Bed(hosts=1) as made:
        process = made.run("h0", "sleep", "600")
        assert process.pid in made.pids("h0")
        prefix = made._prefix
    assert process.poll() is not None
    assert prefix not in bed._command("ip", "netns", "list")


def test_the_bed_of_a_dead_run_is_swept_and_that_of_a_living_one_is_not() -> None:
    script = """if True:
        import os, subprocess, bed
        made = bed.Bed(hosts=1)
        made._make()
        made.run("h0", "sleep", "600", stdout=subprocess.DEVNULL)
        print(made._prefix, flush=True)
        os._exit(0)
    """
    with Bed(hosts=1) as living:
        sleeper = living.run("h0", "sleep", "600")
        command = [sys.executable, "-c", script]
        died = subprocess.run(command, check=True, cwd=Path(bed.__file__).parent, stdout=subprocess.PIPE, text=True)
        prefix = died.stdout.strip()
        assert prefix in bed._command("ip", "netns", "list")
        assert {f"{prefix}-h0", f"{prefix}-switch"} <= set(bed.sweep())
        assert prefix not in bed._command("ip", "netns", "list")
        assert sleeper.pid in living.pids("h0")
