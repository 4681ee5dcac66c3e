"""What is asked for in random lives: a group, a model and its question, and scripts that end well, badly, or not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kit.specs import DEMO_MODEL
from muster.protocol import Generate
from muster.sampling import Message
from muster.spec import Deadlines, GroupWorkload, InstanceSpec, ModelWorkload, Restart, ScriptWorkload, Workload

#: How long a request may wait for its first token, and about how long it may take after that.
QUESTION_SECONDS = 20.0
#: Short where something is to be given up, long where a busy machine needs it.
DEADLINES = Deadlines(
    prepare_seconds=20.0,
    form_seconds=6.0,
    load_seconds=20.0,
    warm_seconds=20.0,
    step_seconds=6.0,
    drain_seconds=1.0,
    stop_seconds=0.5,
)
QUESTION = Generate(
    instance="demo",
    messages=(Message(role="user", content="What is an instance?"),),
    wait_seconds=QUESTION_SECONDS,
)
SCRIPTS = {
    "stubborn": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
    "brief": "import mlx.core as mx\nmx.eval(mx.distributed.all_sum(mx.ones(1)))\n",
    "failing": "raise SystemExit(3)\n",
}
WORKLOADS: dict[str, Workload] = {
    "group": GroupWorkload(),
    "model": ModelWorkload(model=str(DEMO_MODEL), sharding="pipeline", served_name=QUESTION.instance),
}


def wish(kind: str, ranks: int, restart: Restart, paths: Mapping[str, Path]) -> InstanceSpec:
    """A workload of this kind; `paths` is where the scripts are. A group has two ranks at least, a model at most."""
    ranks = min(ranks, 2) if kind == "model" else max(ranks, 2) if kind == "group" else ranks
    workload = WORKLOADS[kind] if kind in WORKLOADS else ScriptWorkload(path=str(paths[kind]))
    return InstanceSpec(workload=workload, ranks=ranks, restart=restart, deadlines=DEADLINES)
