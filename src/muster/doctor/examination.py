"""The whole of `muster doctor`: from what the probes of this machine gave to checks. Pure."""

from __future__ import annotations

from muster.doctor.checks import Check, failure
from muster.doctor.findings import (
    Examined,
    check_directory,
    check_hub,
    check_local_network,
    check_mlx,
    check_ports,
    check_range,
)
from muster.doctor.machine import check_machine


def check_local(found: Examined) -> tuple[Check, ...]:
    """Every check of this machine."""
    if isinstance(found.facts, str):
        machine = (failure("facts", found.facts, "Run it again; if it stays so, report it."),)
    else:
        machine = check_machine(found.facts)
    last = tuple(check for check in machine if check.name == "not found out")
    network = tuple(check_local_network(found.local_network))
    tried = {check.name for check in network}  # what was tried says more than that macOS asks
    return (
        *(check for check in machine if check not in last and check.name not in tried),
        *network,
        *check_mlx(found.mlx, found.facts),
        *check_directory(found.directory),
        *check_ports(found.ports),
        *check_range(found.range),
        *check_hub(found.hub),
        *last,
    )
