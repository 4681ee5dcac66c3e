"""Instances that stand still where something is to happen to them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

from kit.cluster import Stage
from kit.processes import stopped
from kit.specs import group, script, spec_of, stretched_model
from muster.events import RankConnected, RankPrepared
from muster.spec import InstanceId, ModelWorkload

#: Where an instance can be when something happens to it.
STATES = ["idle", "preparing", "forming", "loading", "ready", "script"]


@contextlib.contextmanager
def brought_to(made: Stage, state: str, tmp_path: Path) -> Generator[InstanceId | None]:
    """An instance on both nodes that is in this state, or none."""
    with contextlib.ExitStack() as stack:
        match state:
            case "preparing" | "forming":
                instance = made.client.create(group())
                stack.enter_context(stopped(made.new_runner("a")))
                second = stack.enter_context(stopped(made.new_runner("b")))
                if state == "forming":
                    second.resume()
                    made.client.wait(RankPrepared, instance, rank=1)
                    second.suspend()
                    made.runners("a")[0].resume()
                    made.client.wait(RankPrepared, instance, rank=0)
            case "loading":
                path = stretched_model(tmp_path / "slow", 400)
                instance = made.client.create(spec_of(ModelWorkload(model=str(path)), 2, ("a", "b")))
                made.client.wait(RankConnected, instance, rank=0)
            case "ready":
                instance = made.client.create(group())
                made.client.ready(instance)
            case "script":
                instance = made.client.create(script(tmp_path, "import time\ntime.sleep(600)\n"))
                made.client.ready(instance)
            case _:
                instance = None
        yield instance
