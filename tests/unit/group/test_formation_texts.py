"""MLX's error texts become causes and remedies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from muster.group.formation import translate


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
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
        ("something new", "something new", "other ranks"),
    ],
)
def test_translation(text: str, cause: str, remedy: str) -> None:
    found = translate(text)
    assert cause in found[0]
    assert remedy in found[1]


def test_nothing_imports_mlx_before_it_is_needed() -> None:
    code = (
        "import sys, muster.group.payload, muster.group.scope, muster.group.ports, muster.group.listening, "
        "muster.group.formation, muster.group.verify; print('mlx.core' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "False"
