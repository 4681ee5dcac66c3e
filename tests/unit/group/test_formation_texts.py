"""MLX's error texts, errnos and crashes become causes and remedies."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from muster.group.remedies import REMEDIES, explain, explain_signal, translate

TEXTS = [
    ("[ring] Couldn't connect (error: 111)", "did not take the connection", "firewalls"),
    ("[ring] Couldn't connect (error: 61)", "did not take the connection", "firewalls"),
    ("[jaccl] Couldn't connect to any resolved address (last error: 61)", "did not take", "firewalls"),
    ("[ring] Accept failed (error: 4)", "interrupted by a signal", "did not dial"),
    ("[ring] Couldn't bind socket (error: 98)", "port is taken", "other ports"),
    ("[ring] Couldn't bind socket (error: 49)", "not an address of this node", "restart the worker"),
    ("[ring] connection to a peer was lost", "process ended", "log"),
    ("Can't parse address ::1", "no IPv4 address", "IPv4"),
    ("[json.exception.parse_error.101] parse error", "could not be read", "directory"),
    ("[jaccl] Changing queue pair to RTR failed with errno 22", "Thunderbolt bridge", "IPv4"),
    ("[jaccl] Changing queue pair to RTR failed with errno 16", "busy", "reboot"),
    ("[jaccl] Changing queue pair to RTR failed with errno 60", "wrong interface", "Thunderbolt"),
    ("[jaccl] Changing queue pair to RTR failed with errno 96", "idle", "replug"),
    ("[jaccl] Couldn't allocate protection domain", "protection domain", "reboot"),
    ("[jaccl] The configuration should define a valid mesh or a valid ring.", "matrix", "cables"),
    ("[jaccl] Changing queue pair to RTS failed with errno 60", "wrong interface", "Thunderbolt"),
    ("[jaccl] Changing queue pair to INIT failed with errno 12", "did not accept", "ibv_devinfo"),
    ("[jaccl] Couldn't create queue pair", "no queue pair left", "reboot"),
    ("[jaccl] Creating the queue pair failed with errno 16. Thunderbolt …", "no queue pair left", "reboot"),
    ("[jaccl] Couldn't create completion queue", "completion queue", "reboot"),
    ("[jaccl] Register memory region failed", "100 regions", "other jaccl instance"),
    ("[jaccl] No IPv4-mapped GID for this device.", "no IPv4 address", "link-local"),
    ("[ring] Couldn't bind socket (error: 13)", "not permitted", "1023"),
    ("[ring] It is required to have as many connections to the left as to the right", "more addresses", "equally many"),
    ("[jaccl] Could not find device rdma_en2 (0 available)", "not there", "create the instance again"),
    ("[jaccl] Couldn't open device rdma_en2", "cannot be opened", "rdma_ctl"),
    ("[jaccl] Recv failed with errno=2", "connection between the ranks broke", "cable"),
    ("[jaccl] Send failed with error code 22", "connection between the ranks broke", "cable"),
    ("[jaccl] Recv failed: peer closed the side channel", "process ended", "log"),
    ("[jaccl] The JACCL mesh supports up to 8 peers but 9 were provided.", "8 ranks", "fewer ranks"),
    ("[jaccl] Up to 4 per direction supported but 5 were provided.", "4 wires", "fewer ranks or wires"),
    ("[jaccl] You need to provide via environment variables a rank", "did not find its variables", "JACCL_*"),
    ("[jaccl] The device file should contain the connectivity of", "square matrix", "one row per rank"),
    ("[ring] Send only supported to direct neighbors but", "direct neighbours", "mesh"),
    ("[ring] Couldn't connect (error: 110)", "did not answer", "firewalls"),
    ("[jaccl] Couldn't connect (error: 60)", "did not answer", "firewalls"),
    ("[ring] Couldn't connect (error: 65)", "cannot be reached", "Local Network"),
    ("[ring] Accept failed (error: 24)", "no file descriptor left", "ulimit"),
    ("Cannot initialize jaccl distributed backend.", "no such backend", "Thunderbolt 5"),
    ("[METAL] … Caused GPU Timeout Error", "waited too long", "CPU's stream"),
    ("something new", "something new", "other ranks"),
]


@pytest.mark.parametrize(("text", "cause", "remedy"), TEXTS)
def test_translation(text: str, cause: str, remedy: str) -> None:
    found = translate(text)
    assert cause in found[0]
    assert remedy in found[1]


def test_every_entry_is_reached() -> None:
    """An entry that others before it always match first would never be seen."""
    assert {one.cause for text, *_ in TEXTS if (one := explain(text)) is not None} == {one.cause for one in REMEDIES}


def test_what_only_somebody_at_the_machine_can_mend_is_lasting() -> None:
    lasting = ["RTR failed with errno 16", "create queue pair", "allocate protection domain", "find device"]
    assert all((found := explain(f"[jaccl] Couldn't {text}")) is not None and found.lasting for text in lasting)
    passing = explain("[jaccl] No IPv4-mapped GID for this device.")
    assert passing is not None
    assert not passing.lasting, "macOS gives the port an address by itself, minutes later"


def test_a_crash_of_jaccl_is_explained_and_of_the_ring_is_not() -> None:
    found = explain_signal(signal.SIGSEGV, backend="jaccl")
    assert found is not None
    assert "cable" in found.remedy
    assert explain_signal(signal.SIGSEGV, backend="ring") is None
    assert explain_signal(signal.SIGKILL, backend="jaccl") is None


def test_nothing_imports_mlx_before_it_is_needed() -> None:
    code = (
        "import sys, muster.group.payload, muster.group.scope, muster.group.ports, muster.group.listening, "
        "muster.group.formation, muster.group.verify; print('mlx.core' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "False"
