"""The commands that measure: `bench formation`, `serve`, `recovery`, `memory`, `placement`, `copy` and `soak`."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from muster.cli.options import parse_choice
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bench.report import Report

#: As `muster.bench.samples.PARTS`, which `muster --help` need not import.
_SERVE_PARTS = ("throughput", "latency", "start", "idle", "soak", "prefix")
#: As `muster.bench.recovery_figures.PARTS`.
_RECOVERY_PARTS = ("rank-kill", "rank-stop", "cut", "coordinator-kill", "worker-kill", "log", "peer")

T = TypeVar("T")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    bench = typer.Typer(
        name="bench",
        help="Measure muster beside its peers, on a cluster of its own. All but soak exit 0 whether or not bars hold.",
        no_args_is_help=True,
    )
    bench.command("formation")(formation)
    bench.command("serve")(serve)
    bench.command("recovery")(recovery)
    bench.command("soak")(soak)
    bench.command("memory")(memory)
    bench.command("placement")(placement)
    bench.command("copy")(copy)
    app.add_typer(bench)


def formation(
    rounds: Annotated[int, typer.Option(help="Rounds beside the peer.", min=1, max=1000)] = 15,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds of everything: to see that it works.")] = False,
) -> None:
    """How fast groups come up, beside mlx.launch; what 20 at once leave behind; what an idle one costs."""
    from muster.bench.formation import QUICK, FormationSettings, measure

    settings = QUICK if quick else FormationSettings(rounds=rounds)
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=None)


def serve(
    rounds: Annotated[int, typer.Option(help="Times that each server is started.", min=1, max=100)] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; again for more. One of: {', '.join(_SERVE_PARTS)}.", metavar="PART"),
    ] = None,
    soak_seconds: Annotated[float, typer.Option(help="How long 200 clients ask.", min=1, max=86_400)] = 120.0,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A little of everything: to see that it works.")] = False,
) -> None:
    """How fast models answer over HTTP, beside mlx_lm.server on one rank and on two, and what it costs.

    The models are made on the spot: one of 1 M parameters, where overhead is everything, and one of 7 M. All servers
    get the same files, prompts and environment, one after the other; speeds are medians of the rounds.
    """
    import msgspec

    from muster.bench.serving import QUICK, ServingSettings, measure

    for part in only or ():
        parse_choice("--only", part, _SERVE_PARTS)
    settings = QUICK if quick else ServingSettings(rounds=rounds)
    if only:
        chosen = tuple(part for part in settings.parts if part in only)
        settings = msgspec.structs.replace(settings, parts=chosen)
    if not quick:
        settings = msgspec.structs.replace(settings, soak=msgspec.structs.replace(settings.soak, seconds=soak_seconds))
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=output)


def recovery(
    rounds: Annotated[int, typer.Option(help="Times that each thing is broken.", min=1, max=1000)] = 20,
    kills: Annotated[int, typer.Option(help="Kills of the coordinator under churn.", min=1, max=10_000)] = 200,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; again for more. One of: {', '.join(_RECOVERY_PARTS)}.", metavar="PART"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the moments of those kills, to see the same ones again.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One round of each, and short clocks.")] = False,
) -> None:
    """How fast muster notices what dies, hangs or is cut off, and how fast it is whole again; half an hour.

    A rank of the demo model is killed and stopped while it answers, a node is cut off, a worker and the coordinator
    are killed; each round looks at the cause that is told, too. Beside it mlx.launch, once, with a rank killed.
    """
    import msgspec

    from muster.bench.recovery import QUICK, RecoverySettings, measure

    for part in only or ():
        parse_choice("--only", part, _RECOVERY_PARTS)
    settings = QUICK if quick else RecoverySettings(rounds=rounds, kills=kills)
    chosen = tuple(part for part in settings.parts if not only or part in only)
    settings = msgspec.structs.replace(settings, seed=seed, parts=chosen)
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=output)


def memory(
    only: Annotated[
        list[str] | None, typer.Option(help="Only this model type; again for more.", metavar="TYPE")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two families: to see that it works.")] = False,
) -> None:
    """How far predicted memory is from what ranks really take: all families that mlx-lm can share out, small ones."""
    from muster.bench.memory import FAMILIES, QUICK, MemorySettings, measure

    for family in only or ():
        parse_choice("--only", family, FAMILIES)
    settings = QUICK if quick else MemorySettings()
    settings = MemorySettings(families=tuple(only)) if only else settings
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=output)


def soak(
    minutes: Annotated[float, typer.Option(help="How long.", min=0.2, max=10_080)] = 15.0,
    seed: Annotated[int | None, typer.Option(help="Of what is killed, to have the same again.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Create, use, kill and delete for minutes while clients ask without pause. Exits 1 when a promise is broken.

    Ranks, workers and now and then the coordinator are killed. No request may end without an answer or an error,
    nothing may grow, and nothing may be left.
    """
    from muster.bench.churn import ChurnSettings, run_churn

    settings = ChurnSettings(seconds=60 * minutes, seed=seed)
    report = _report(lambda directory, say: run_churn(settings, directory, say), json=json, output=output)
    raise typer.Exit(int(any(one.holds is False for one in report.figures)))


def copy(
    mebibytes: Annotated[int, typer.Option("--size", help="MiB to copy.", min=1, max=2**20)] = 1024,
    rounds: Annotated[int, typer.Option(help="Copies by each way.", min=1, max=100)] = 5,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One small copy: to see that it works.")] = False,
) -> None:
    """How fast a model comes from another node, beside the standard library's sendfile; both over loopback."""
    from muster.bench.copy import QUICK, CopySettings, measure

    settings = QUICK if quick else CopySettings(file_bytes=mebibytes * 2**20, rounds=rounds)
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=output)


def placement(
    rounds: Annotated[int, typer.Option(help="Placements on each cluster.", min=1, max=10_000)] = 15,
    clusters: Annotated[int, typer.Option(help="Random clusters beside brute force.", min=1, max=100_000)] = 2000,
    output: Annotated[Path | None, typer.Option(help="Write the report to this file, too, as JSON.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A little of everything: to see that it works.")] = False,
) -> None:
    """How fast placements on 8, 100 and 1,000 nodes are decided, and whether they are the best there are."""
    from muster.bench.placement import QUICK, PlacementSettings, measure

    settings = QUICK if quick else PlacementSettings(rounds=rounds, clusters=clusters)
    _report(lambda directory, say: measure(settings, directory, say), json=json, output=output)


def _report(
    measure: Callable[[Path, Callable[[str], None]], Awaitable[Report]], *, json: bool, output: Path | None
) -> Report:
    """Measure in a directory of its own and print what was found. A signal ends it, and leaves nothing behind.

    Raises:
        InterruptedBySignalError: a signal came.
    """
    import anyio
    from rich.console import Console

    from muster.bench.report import render
    from muster.cli.processes import configure_logs

    if output is not None and not output.absolute().parent.is_dir():
        raise RequestError(f"--output is {str(output)!r}", remedy="Give a file in a directory that exists.")
    configure_logs("warning")
    progress = Console(stderr=True)
    # The addresses of sockets are short, so the directory has to be, too.
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as directory, progress.status("") as status:
        report = anyio.run(_stoppable, lambda: measure(Path(directory), status.update))
    if output is not None:
        output.write_text(report.to_json() + "\n")
    if json:
        typer.echo(report.to_json())
    else:
        Console().print(render(report))
    return report


async def _stoppable(work: Callable[[], Awaitable[T]]) -> T:
    """Run it to its end, or until a signal cancels it."""
    import anyio

    from muster.cli.errors import InterruptedBySignalError, bare_errors

    received: list[int] = []
    result: list[T] = []
    with bare_errors():
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                    async for number in signals:
                        received.append(number)
                        group.cancel_scope.cancel()

            group.start_soon(watch)
            result.append(await work())
            group.cancel_scope.cancel()
    if not result:
        raise InterruptedBySignalError(received[0])
    return result[0]
