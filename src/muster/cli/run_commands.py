"""`muster exec` and `muster generate`."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.cli.hostfile_commands import HostfileOption, read_hostfile, wished
from muster.cli.options import (
    DEFAULT_ADDRESS,
    BackendOption,
    CoordinatorOption,
    EnvironmentOption,
    InstanceArgument,
    JsonOption,
    NodesOption,
    SideChannelOption,
    TimeoutOption,
    absolute,
    check_positive,
    input_errors,
    parse_backend,
    parse_choice,
    parse_environment,
    parse_nodes,
)
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.bus import ControlClient
    from muster.replies import Chunk, Done


_PROMPT_HELP = "What to ask; `-` reads it from standard input, without the newline at its end."


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("exec", context_settings={"allow_interspersed_args": False})(execute)
    app.command("generate")(generate)


def execute(
    file: Annotated[Path, typer.Argument(help="A Python file that exists on every node.", metavar="FILE")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own, options too.", metavar="[ARGUMENTS]...")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="How many; by default one per node of --nodes, or 1.", metavar="N")
    ] = None,
    nodes: NodesOption = None,
    backend: BackendOption = "auto",
    side_channel: SideChannelOption = "tcp",
    hostfile: HostfileOption = None,
    timeout: TimeoutOption = None,
    environment: EnvironmentOption = None,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Run a Python file as every rank of a group, and end with its exit code.

    What it prints comes as `\\[rank] text`. The instance is deleted in the end, also after Ctrl-C or SIGTERM. The exit
    code is that of the rank that failed first, 128 + N for one that signal N ended; other failures end with 1.
    """
    from muster.cli.client import run
    from muster.cli.execute import execute_script
    from muster.protocol import Create
    from muster.spec import InstanceSpec, ScriptWorkload

    check_positive("--timeout", timeout)
    given = read_hostfile(hostfile, ranks=ranks, nodes=nodes, backend=backend)
    chosen = parse_nodes(nodes)
    with input_errors():
        spec = InstanceSpec(
            workload=ScriptWorkload(
                path=absolute(file),
                arguments=tuple(arguments or ()),
                directory=absolute(Path()),
                environment=parse_environment(environment),
                run_seconds=timeout,
            ),
            ranks=ranks if ranks is not None else max(1, len(chosen)),
            nodes=chosen,
            backend=parse_backend(backend),
            side_channel=parse_choice("--side-channel", side_channel, ("tcp", "bus")),  # pyright: ignore[reportArgumentType]
        )

    async def work(client: ControlClient) -> int:
        request = Create(spec=await wished(client, spec, given), key=secrets.token_hex(8))
        return await execute_script(client, request)

    raise typer.Exit(run(coordinator, work))


def generate(
    instance: InstanceArgument,
    prompt: Annotated[str, typer.Argument(help=_PROMPT_HELP, metavar="PROMPT")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens at most.", metavar="N")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest that together have this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the likeliest N; 0 for all.", metavar="N")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of silence to bear.", metavar="SECONDS")] = 300.0,
    json: JsonOption = False,
    coordinator: CoordinatorOption = DEFAULT_ADDRESS,
) -> None:
    """Ask a model instance, and print its answer as it comes. Ctrl-C stops the generation.

    What a model thinks before it answers goes to standard error. --json prints one map in the end: text, reasoning and
    tool_calls where there are any, reason (stop, length, tool_calls, cancelled), prompt_tokens, cached_tokens,
    completion_tokens, seconds_to_first_token, seconds.
    """
    from muster.cli.asking import generation
    from muster.cli.client import run
    from muster.protocol import Generate
    from muster.replies import Chunk, Prefilled, Started
    from muster.sampling import Message, SamplingParams

    check_positive("--timeout", timeout)
    # The newline that ends a line in a shell is not meant to be part of the prompt.
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty", remedy="Give some text, or `-` to read it from standard input.")
    with input_errors():
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    request = Generate(
        instance=instance,
        prompt=text if raw else None,
        messages=() if raw else (Message(role="user", content=text),),
        sampling=sampling,
    )

    async def work(client: ControlClient) -> None:
        chunks: list[Chunk] = []

        def show(piece: Started | Prefilled | Chunk) -> None:
            if isinstance(piece, Chunk):
                chunks.append(piece)
                if not json:
                    _show_chunk(piece)

        try:
            done = await generation(client, request, timeout, show)
        except BaseException:
            if chunks and not json:  # the shell's prompt or the error begins on a line of its own
                sys.stdout.write("\n")
                sys.stdout.flush()
            raise
        if json:
            _write_answer(done, chunks)
        else:
            _show_done(done)

    run(coordinator, work)


def _show_chunk(chunk: Chunk) -> None:
    """Print what a piece adds: the answer, and beside it what is no part of its text."""
    if chunk.reasoning:
        sys.stderr.write(chunk.reasoning)
        sys.stderr.flush()
    sys.stdout.write(chunk.text + "".join(f"\n{call.name}({call.arguments})" for call in chunk.tool_calls))
    sys.stdout.flush()


def _write_answer(done: Done, chunks: list[Chunk]) -> None:
    from muster.cli import documents

    reasoning = "".join(chunk.reasoning for chunk in chunks)
    calls = [{"name": call.name, "arguments": call.arguments} for chunk in chunks for call in chunk.tool_calls]
    documents.write(
        {
            "text": "".join(chunk.text for chunk in chunks),
            **({"reasoning": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
            "reason": done.reason,
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "completion_tokens": done.completion_tokens,
            "seconds_to_first_token": done.seconds_to_first_token,
            "seconds": done.seconds,
        }
    )


def _show_done(done: Done) -> None:
    sys.stdout.write("\n")
    if sys.stderr.isatty():
        after_first = max(done.seconds - done.seconds_to_first_token, 1e-9)
        rate = (done.completion_tokens - 1) / after_first if done.completion_tokens > 1 else 0.0
        speed = f", {rate:.0f} tokens/s" if rate else ""
        first = f"the first after {done.seconds_to_first_token:.2f} s"
        typer.echo(f"{done.completion_tokens} tokens ({done.reason}), {first}{speed}", err=True)
