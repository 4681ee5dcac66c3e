"""`muster create` and `muster delete`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.hostfile_commands import HostfileOption, wished
from muster.cli.options import (
    DEFAULT_ADDRESS,
    BackendOption,
    CoordinatorOption,
    EnvironmentOption,
    InstancesArgument,
    JsonOption,
    NodesOption,
    SideChannelOption,
    TimeoutOption,
    absolute,
    check_positive,
    parse_choice,
    parse_environment,
)
from muster.cli.specs import Placing, Serving, model_workload
from muster.cli.wishes import (
    PLACING_SECONDS,
    ConcurrencyOption,
    ContextOption,
    DeadlineOption,
    MaxBatchOption,
    MemoryOption,
    NameOption,
    NetworkOption,
    PrefillChunkOption,
    PromptCacheOption,
    RanksOption,
    RestartOption,
    RevisionOption,
    ServedNameOption,
    ShardingOption,
    SplitOption,
    TrustOption,
)
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.cli.waiting import Waiting
    from muster.cli.watch import Watcher
    from muster.group.hostfile import Hostfile
    from muster.protocol import Create
    from muster.replies import Created
    from muster.spec import InstanceId, InstanceSpec, Workload


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("create")(create)
    app.command("delete")(delete)


def create(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="An mlx-lm model: a directory that exists on every node, or a hub id. After `--`: the script's own.",
            metavar="[MODEL] [-- ARGUMENTS]",
        ),
    ] = None,
    script: Annotated[Path | None, typer.Option(help="Run this Python file as every rank.", metavar="FILE")] = None,
    group: Annotated[bool, typer.Option("--group", help="Only form the group and hold it.")] = False,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    split: SplitOption = None,
    backend: BackendOption = "auto",
    side_channel: SideChannelOption = "tcp",
    hostfile: HostfileOption = None,
    sharding: ShardingOption = "auto",
    served_name: ServedNameOption = None,
    context: ContextOption = None,
    concurrency: ConcurrencyOption = None,
    network: NetworkOption = None,
    max_batch: MaxBatchOption = None,
    prefill_chunk: PrefillChunkOption = None,
    prompt_cache: PromptCacheOption = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    restart: RestartOption = None,
    name: NameOption = None,
    timeout: TimeoutOption = None,
    memory: MemoryOption = None,
    deadline: DeadlineOption = None,
    environment: EnvironmentOption = None,
    wait: Annotated[
        bool,
        typer.Option("--wait/--no-wait", help="Wait until it is ready, a script until its end, and show how."),
    ] = False,
    wait_seconds: Annotated[float | None, typer.Option(help="Wait no longer than this.", metavar="SECONDS")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show how, while waiting.")] = False,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Create an instance: a served model, a script, or a bare group. Prints its id.

    With --wait it ends with 0 once every rank of a model or group is ready, or once a script has finished on every
    rank; with 1 and the cause when the last attempt has failed, or when --wait-seconds are over.
    --json prints {"instance", "sequence"}, and with --wait the keys of `muster ps --json`. Where it is refused, it
    prints {"refused"} with kind, message, remedy and shortfalls: by node what it was short of (node, what, reason,
    needed_bytes, available_bytes, missing_bytes).
    """
    from muster.cli.waiting import Waiting

    check_positive("--timeout", timeout)
    check_positive("--wait-seconds", wait_seconds)
    placing = Placing(
        ranks=ranks,
        nodes=nodes,
        split=split,
        backend=backend,
        side_channel=side_channel,
        hostfile=hostfile,
        network=network,
        memory=memory,
        name=name,
        restart=restart,
        deadline=deadline,
    )
    serving = Serving(
        revision=revision,
        trust_remote_code=trust_remote_code,
        served_name=served_name,
        context=context,
        concurrency=concurrency,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
        prompt_cache=prompt_cache,
    )
    given = placing.given()
    spec = placing.spec(serving.upon(_workload(arguments or [], script, group, sharding, timeout, environment)))
    waiting = Waiting(seconds=wait_seconds, quiet=quiet) if wait or wait_seconds is not None else None
    _create(coordinator, spec, waiting, json, given)


def _workload(
    arguments: list[str],
    script: Path | None,
    group: bool,
    sharding: str,
    timeout: float | None,
    environment: list[str] | None,
) -> Workload:
    """What to run; exactly one of a model, a script and a group.

    Raises:
        RequestError: it is none or several, or an option belongs to another.
    """
    from muster.spec import GroupWorkload, ScriptWorkload

    remedy = "Give a model (muster create MODEL), or --script FILE [-- ARGUMENTS], or --group."
    if script is not None and group:
        raise RequestError("--script and --group exclude each other", remedy=remedy)
    parse_choice("--sharding", sharding, ("auto", "pipeline", "tensor"))
    stray = [option for option, given in (("--timeout", timeout is not None), ("--env", bool(environment))) if given]
    if script is None and stray:
        what = " and ".join(stray) + (" is" if len(stray) == 1 else " are")
        them = "it" if len(stray) == 1 else "them"
        raise RequestError(f"{what} for scripts only", remedy=f"Leave {them} out, or give --script FILE.")
    if script is not None:
        return ScriptWorkload(
            path=absolute(script),
            arguments=tuple(arguments),
            directory=absolute(Path()),
            environment=parse_environment(environment),
            run_seconds=timeout,
        )
    if group:
        if arguments:
            raise RequestError(f"--group takes no model and no arguments, but there is {arguments[0]!r}", remedy=remedy)
        return GroupWorkload()
    if len(arguments) != 1 or not arguments[0].strip():
        what = f"there are {len(arguments)} models" if len(arguments) > 1 else "there is nothing to create"
        raise RequestError(what, remedy=remedy)
    return model_workload(arguments[0], sharding)


def _create(coordinator: str, spec: InstanceSpec, waiting: Waiting | None, json: bool, given: Hostfile | None) -> None:
    from muster.bus import RefusedError
    from muster.cli import documents
    from muster.cli.client import run
    from muster.protocol import Create
    from muster.replies import Created

    key = secrets.token_hex(8)

    async def work(client: ControlClient) -> int:
        request = Create(spec=await wished(client, spec, given), key=key)
        if waiting is not None:
            return await _create_and_wait(client, request, waiting, json)
        created = await client.ask(request, PLACING_SECONDS, Created)
        if json:
            documents.write({"instance": created.instance, "sequence": created.sequence})
        else:
            typer.echo(created.instance)
        return 0

    try:
        code = run(coordinator, work)
    except RefusedError as error:
        if json:
            documents.write({"refused": documents.refusal(error.failure, error.shortfalls)})
        raise
    raise typer.Exit(code)


async def _create_and_wait(client: ControlClient, request: Create, waiting: Waiting, json: bool) -> int:
    from muster.cli import documents
    from muster.cli.waiting import conclude, goal_of, until_awaited
    from muster.cli.watch import watching
    from muster.replies import Created

    shown = waiting.display()
    async with watching(client, shown) as watcher:
        created = await client.ask(request, PLACING_SECONDS, Created)
        name = created.instance
        if not json:
            typer.echo(name)
        if not waiting.quiet:
            await _show_choice(watcher, created)
            watcher.shown.add(name)
        with shown:
            state = await until_awaited(client, watcher, [name], created.sequence, waiting.seconds)
    if json and name in state.instances:
        documents.write(documents.instance_summary(state.instances[name]))
    return conclude(state, name, goal_of(request.spec), waiting)


async def _show_choice(watcher: Watcher, created: Created) -> None:
    """Say where it goes, as soon as that is heard."""
    import anyio

    from muster.cli.client import CALL_SECONDS
    from muster.cli.errors import show_note
    from muster.cli.render_place import choice

    with anyio.move_on_after(CALL_SECONDS):
        await watcher.until(lambda state: watcher.reached(created.sequence))
    instance = watcher.state.instances.get(created.instance)
    if instance is not None:
        nodes = [rank.node for rank in instance.ranks]
        show_note(f"{instance.id}: {choice(nodes, instance.backend, instance.layout)}")


def delete(
    instances: InstancesArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every instance there is.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Cut off the requests that a model has begun.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until every process is gone.")] = True,
    wait_seconds: Annotated[
        float, typer.Option(help="Wait no longer than this, once models have had their time.", metavar="SECONDS")
    ] = 30.0,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Delete instances and wait until nothing of them is left on any node. Prints the ids.

    A model first finishes the requests that it has begun, for as long as its spec's drain_seconds allow; --now cuts
    them off, also those of a deletion that is under way.
    """
    from muster.cli.client import run, view
    from muster.coordinator.find import find

    check_positive("--wait-seconds", wait_seconds)
    if every == bool(instances):
        raise RequestError(
            "there are both instances and --all" if every else "there is nothing to delete",
            remedy="Give instances (see: muster ps), or --all.",
        )

    async def work(client: ControlClient) -> int:
        state = (await view(client)).state
        wanted = list(state.instances) if every else [find(state, name).id for name in instances or ()]
        drains = (state.instances[name].spec.deadlines.drain_seconds for name in wanted)
        seconds = wait_seconds + (0.0 if now else max(drains, default=0.0))
        return await remove(client, wanted, seconds if wait else 0.0, now=now)

    raise typer.Exit(run(coordinator, work))


async def remove(
    client: ControlClient, instances: list[InstanceId], wait_seconds: float, *, now: bool = False, quiet: bool = False
) -> int:
    """Delete these and wait until nothing of them is left; prints each id then. The exit code."""
    import anyio

    from muster.bus import RefusedError
    from muster.cli.client import CALL_SECONDS
    from muster.cli.errors import EXIT_FAILED, show_note
    from muster.cli.watch import left_over, watching
    from muster.protocol import Delete
    from muster.replies import Accepted

    last = 0
    for name in instances:
        try:
            last = max(last, (await client.ask(Delete(instance=name, now=now), CALL_SECONDS, Accepted)).sequence)
        except RefusedError as error:
            if error.failure.kind != RequestError.kind:
                raise
            # Somebody else has deleted it since it was looked up.
    if wait_seconds <= 0:
        _echo([] if quiet else instances)
        return 0
    async with watching(client) as watcher:
        with anyio.move_on_after(wait_seconds):
            await watcher.until(
                lambda state: watcher.reached(last) and not any(name in state.instances for name in instances)
            )
        state = watcher.state
    _echo([] if quiet else [name for name in instances if name not in state.instances])
    left = [name for name in instances if name in state.instances]
    if not left:
        return 0
    show_note(f"after {wait_seconds:g} s not gone: {', '.join(left)}; still there: {', '.join(left_over(state, left))}")
    show_note("the deletion goes on; a node that does not answer is given up when its lease ends: see `muster nodes`")
    return EXIT_FAILED


def _echo(lines: list[InstanceId]) -> None:
    for line in lines:
        typer.echo(line)
