"""Entry of the runner process: `python -m muster.runner DESCRIPTOR PARENT_PID full|light|probe [COUNTER]`."""

from __future__ import annotations

import sys

from muster.runner.main import main

main(
    int(sys.argv[1]),
    int(sys.argv[2]),
    full=sys.argv[3] == "full",
    counter=int(sys.argv[4]) if len(sys.argv) > 4 else None,
    measure=sys.argv[3] == "probe",
)
