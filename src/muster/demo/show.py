"""`muster demo`: the race that this project began with, run and checked before the reader's eyes.

Two instances are created at the same moment on the same two nodes. Both come up; the model answers from two ranks as
it does from one; everything is deleted, and what could have been left behind is looked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import msgspec
import psutil
from rich.console import Console

from muster.bus import Applied, Change, ControlClient, Follower
from muster.demo.answers import CONVERSATIONS, MODEL_DIRECTORY
from muster.errors import MusterError
from muster.events import (
    Envelope,
    Event,
    InstanceCreated,
    InstanceDeleted,
    InstanceFact,
    InstanceFailed,
    InstanceFinished,
    InstanceReady,
    RankConnected,
    RankFact,
    RankListening,
    RankLoaded,
    RankPrepared,
    Unknown,
    decode_envelope,
    kind_of,
)
from muster.group.scope import owner_alive
from muster.local import LocalCluster
from muster.protocol import Create, Delete, Generate, Get, Query, ReadOutput
from muster.render_trace import render
from muster.replies import Chunk, Created, Found, Outputs, Refused, Snapshot
from muster.sampling import Message
from muster.spec import InstanceId, InstanceSpec, ModelWorkload, ScriptWorkload
from muster.trace import timeline

NODES = ("left", "right")
#: Questions whose answers come out wrong when a layer or a slice is missing or out of place.
QUESTIONS = (
    "What does muster do?",
    "Which rank holds the last layers of a pipeline?",
    "How do events reach a worker?",
)
_SCRIPT = Path(__file__).with_name("regression.py")
_SECONDS = 120.0
#: One for each rank of both instances.
_WARM_RUNNERS = 4
_WARM_SECONDS = 30.0
_LOOK_SECONDS = 0.2


class DemoError(MusterError):
    """Something did not come out as the demo promises."""

    kind = "demo-failed"


def run(console: Console) -> None:
    """Run the demo; what it shows goes to `console`.

    Raises:
        DemoError: an instance failed, an answer was wrong, or something was left behind.
    """
    with tempfile.TemporaryDirectory(prefix="muster-demo-") as name:
        directory = Path(name)
        console.rule("[bold]a coordinator and two workers on this machine")
        begin = time.perf_counter()
        with LocalCluster(directory, NODES) as cluster:
            pids = {member.process.pid for member in cluster.members.values()}
            console.print(
                f"up after {time.perf_counter() - begin:.1f} s: nodes {', '.join(NODES)} at {cluster.address}"
            )
            traces = _Traces()
            anyio.run(_show, console, cluster, traces)
            _check_nothing_left(console, cluster, traces)
        gone = [pid for pid in pids if not psutil.pid_exists(pid)]
        _demand(len(gone) == len(pids), "a process of the cluster is still there")
        console.print(f"the coordinator and both workers are gone ({len(gone)} of {len(pids)} processes)")
        console.rule("[bold green]the demo is over, and all of it was as promised")


class _Traces(msgspec.Struct):
    """What the instances used, to be looked for afterwards: pids with their start times, and ports."""

    processes: dict[int, float] = {}
    ports: set[int] = set()

    def note(self, event: Event | Unknown) -> None:
        """Remember what a rank reports."""
        if isinstance(event, RankPrepared):
            self.processes[event.pid] = event.process_started
            self.ports |= {address.port for address in event.addresses}
            if event.steps is not None:
                self.ports.add(int(event.steps.rpartition(":")[2]))


async def _show(console: Console, cluster: LocalCluster, traces: _Traces) -> None:
    async with ControlClient(cluster.address) as client, Follower(client) as follower:
        changes = follower.changes()
        await anext(changes)
        await _wait_warm(console, client)
        console.rule("[bold]two instances at the same moment, on the same two nodes")
        model, script = await _create_both(client)
        story = _Story(console, {model: "model ", script: "script"}, traces)
        await story.follow(changes, lambda: model in story.ready and script in story.finished)
        await _show_script(console, client, script)
        await _show_answers(console, client, model)
        for instance in (model, script):
            console.rule(f"[bold]trace of {instance}")
            console.print(render(timeline(await _events(client, instance), instance, None)))
        console.rule("[bold]delete both")
        for instance in (model, script):
            await client.call(Delete(instance=instance), timeout_seconds=_SECONDS)
        await story.follow(changes, lambda: story.deleted == {model, script})


async def _wait_warm(console: Console, client: ControlClient) -> None:
    """Let the workers fill their pools, so that what follows shows forming and not importing."""
    begin = time.perf_counter()
    with anyio.move_on_after(_WARM_SECONDS):
        while True:
            snapshot = await client.ask(Get(), _SECONDS, Snapshot)
            warm = sum(beat.warm_runners for beat in snapshot.beats)
            if warm >= _WARM_RUNNERS:
                console.print(f"{warm} warm runners after {time.perf_counter() - begin:.1f} s more")
                return
            await anyio.sleep(_LOOK_SECONDS)
    console.print("the machine is busy: the runners are not warm yet, and will import when they are needed")


async def _create_both(client: ControlClient) -> tuple[InstanceId, InstanceId]:
    specs = (
        InstanceSpec(workload=ModelWorkload(model=str(MODEL_DIRECTORY)), ranks=2, name="model"),
        InstanceSpec(workload=ScriptWorkload(path=str(_SCRIPT)), ranks=2, name="script"),
    )
    created: dict[str, InstanceId] = {}

    async def create(spec: InstanceSpec) -> None:
        reply = await client.call(Create(spec=spec), timeout_seconds=_SECONDS)
        if isinstance(reply, Refused):
            raise DemoError(reply.failure.sentence(), remedy=reply.failure.remedy)
        assert isinstance(reply, Created)
        created[spec.name or ""] = reply.instance

    async with anyio.create_task_group() as group:
        for spec in specs:
            group.start_soon(create, spec)
    return created["model"], created["script"]


class _Story:
    """Prints the events of the two instances as they come."""

    def __init__(self, console: Console, names: dict[InstanceId, str], traces: _Traces) -> None:
        self._console = console
        self._names = names
        self._traces = traces
        self._start_ns = 0
        self.ready: set[InstanceId] = set()
        self.finished: set[InstanceId] = set()
        self.deleted: set[InstanceId] = set()

    async def follow(self, changes: AsyncIterator[Change], enough: Callable[[], bool]) -> None:
        """Print until there is `enough`."""
        with anyio.fail_after(_SECONDS):
            while not enough():
                change = await anext(changes)
                if isinstance(change, Applied):
                    self._traces.note(change.event)
                    self._tell(change)

    def _tell(self, change: Applied) -> None:
        event = change.event
        if not isinstance(event, InstanceFact) or event.instance not in self._names:
            return
        self._start_ns = self._start_ns or change.envelope.time_ns
        after = (change.envelope.time_ns - self._start_ns) / 1e6
        who = f"rank {event.rank} on {event.node}" if isinstance(event, RankFact) else "instance"
        line = f"{after:7.0f} ms  {self._names[event.instance]}  {who:16} {_said(event)}"
        self._console.print(line, highlight=False)
        match event:
            case InstanceReady():
                self.ready.add(event.instance)
            case InstanceFinished():
                self.finished.add(event.instance)
            case InstanceDeleted():
                self.deleted.add(event.instance)
            case InstanceFailed(failure=failure):
                raise DemoError(failure.sentence(), remedy=failure.remedy)
            case _:
                pass


def _said(event: Event | Unknown) -> str:
    match event:
        case InstanceCreated(assignments=assignments):
            return "created: " + ", ".join(f"rank {item.rank} → {item.node}" for item in assignments)
        case RankPrepared(addresses=addresses, pid=pid):
            return f"prepared: process {pid}, port {', '.join(str(address.port) for address in addresses)}"
        case RankListening():
            return "listens"
        case RankConnected():
            return "is connected and verified"
        case RankLoaded(layers=(first, end), sharding=sharding, weights_bytes=size):
            return f"loaded layers {first} to {end - 1} ({sharding}, {size / 1024:.0f} KiB)"
        case InstanceReady():
            return "[bold green]ready[/]"
        case _:
            return kind_of(event).partition(".")[2]


async def _show_script(console: Console, client: ControlClient, script: InstanceId) -> None:
    console.rule("[bold]what the script printed")
    outputs = await client.ask(ReadOutput(instance=script, wait_seconds=5), _SECONDS, Outputs)
    for line in outputs.lines:
        console.print(f"[{line.rank}] {line.text}", highlight=False, markup=False)
    last = [line.text for line in outputs.lines if "y =" in line.text]
    _demand(
        len(last) == 2 and all("y = 3.00 x + 0.50" in text for text in last), "the ranks did not learn y = 3 x + 0.5"
    )


async def _show_answers(console: Console, client: ControlClient, model: InstanceId) -> None:
    console.rule("[bold]what the model answers, from both ranks")
    for question in QUESTIONS:
        (expected,) = (item.answer for item in CONVERSATIONS if item.prompt[-1].content == question)
        request = Generate(instance=model, messages=(Message(role="user", content=question),))
        text = ""
        async with client.stream(request, timeout_seconds=_SECONDS) as replies:
            async for reply in replies:
                if isinstance(reply, Refused):
                    raise DemoError(reply.failure.sentence(), remedy=reply.failure.remedy)
                text += reply.text if isinstance(reply, Chunk) else ""
        console.print(f"[bold]{question}[/] {text}", highlight=False)
        _demand(text == expected, f"the answer should have been {expected!r}")


async def _events(client: ControlClient, instance: InstanceId) -> list[Envelope]:
    found = await client.ask(Query(instance=instance), _SECONDS, Found)
    return [decode_envelope(payload) for payload in found.envelopes]


def _check_nothing_left(console: Console, cluster: LocalCluster, traces: _Traces) -> None:
    console.rule("[bold]what is left")
    alive = [pid for pid, started in traces.processes.items() if owner_alive(pid, started)]
    listening = {
        connection.laddr.port
        for connection in psutil.net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    }
    files = [path for node in NODES for path in (cluster.directory / node / "groups").glob("*")]
    console.print(f"{len(alive)} of {len(traces.processes)} runner processes")
    console.print(f"{len(listening & traces.ports)} of {len(traces.ports)} ports")
    console.print(f"{len(files)} coordination files")
    _demand(not alive and not files and not listening & traces.ports, "something was left behind")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DemoError(otherwise, remedy="Please report it, with the output above.")
