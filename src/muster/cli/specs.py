"""What `create` and `place` make of their options: the same spec. Light: `--help` imports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.hostfile_commands import read_hostfile
from muster.cli.options import (
    absolute,
    input_errors,
    parse_backend,
    parse_choice,
    parse_deadlines,
    parse_gib,
    parse_nodes,
    parse_restart,
)
from muster.cli.wishes import choose_ranks, parse_network, parse_ranks, parse_split
from muster.errors import RequestError

if TYPE_CHECKING:
    from muster.group.hostfile import Hostfile
    from muster.spec import InstanceSpec, ModelWorkload, Workload

_MODELS_RESTART = "on-failure:5"
#: What the options of a model's fields are called, where they are not called as the field.
_OPTIONS = {
    "context_tokens": "--context",
    "prefill_chunk_tokens": "--prefill-chunk",
    "prompt_cache_bytes": "--prompt-cache",
}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The options that say how a model is served, as they were given; `None` where they were not."""

    revision: str | None
    trust_remote_code: bool
    served_name: str | None
    context: int | None
    concurrency: int | None
    max_batch: int | None
    prefill_chunk: int | None
    prompt_cache: float | None

    def upon(self, workload: Workload) -> Workload:
        """The workload with these fields set.

        Raises:
            RequestError: it is no model, or a value is out of range.
        """
        import msgspec

        from muster.spec import ModelWorkload

        given: dict[str, str | int | None] = {
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code or None,
            "served_name": self.served_name,
            "context_tokens": self.context,
            "concurrency": self.concurrency,
            "max_batch": self.max_batch,
            "prefill_chunk_tokens": self.prefill_chunk,
            "prompt_cache_bytes": None if self.prompt_cache is None else int(self.prompt_cache * 2**30),
        }
        fields = {field: value for field, value in given.items() if value is not None}
        if fields and not isinstance(workload, ModelWorkload):
            first = _OPTIONS.get(next(iter(fields)), f"--{next(iter(fields)).replace('_', '-')}")
            raise RequestError(f"{first} is for models only", remedy="Leave it out, or give a model.")
        with input_errors():
            return msgspec.structs.replace(workload, **fields)


@dataclass(frozen=True, kw_only=True)
class Placing:
    """The options that say where an instance goes and how it lives, as they were given."""

    ranks: str | None
    nodes: str | None
    split: str | None
    backend: str
    side_channel: str
    hostfile: Path | None
    network: str | None
    memory: float | None
    name: str | None
    restart: str | None
    deadline: list[str] | None

    def given(self) -> Hostfile | None:
        """What the hostfile says, where there is one.

        Raises:
            RequestError: an option that it stands for was given too, or it is none.
        """
        return read_hostfile(self.hostfile, ranks=parse_ranks(self.ranks), nodes=self.nodes, backend=self.backend)

    def spec(self, workload: Workload) -> InstanceSpec:
        """The spec; that of a hostfile is still to be put upon it.

        Raises:
            RequestError: an option's text is none of its values.
        """
        from muster.spec import GroupWorkload, InstanceSpec, ModelWorkload, NeverRestart

        is_model = isinstance(workload, ModelWorkload)
        nodes, split = parse_nodes(self.nodes), parse_split(self.split)
        ranks = str(len(split)) if split and self.ranks is None else self.ranks
        number, auto = choose_ranks(
            ranks,
            len(nodes),
            model=is_model and self.hostfile is None,
            group=isinstance(workload, GroupWorkload),
        )
        restart = _MODELS_RESTART if self.restart is None and is_model else self.restart
        with input_errors():
            return InstanceSpec(
                workload=workload,
                name=self.name,
                ranks=number,
                auto_ranks=auto,
                nodes=nodes,
                split=split,
                network=parse_network(self.network),
                backend=parse_backend(self.backend),
                side_channel=parse_choice("--side-channel", self.side_channel, ("tcp", "bus")),  # pyright: ignore[reportArgumentType]
                restart=NeverRestart() if restart is None else parse_restart(restart),
                deadlines=parse_deadlines(self.deadline),
                memory_bytes=parse_gib("--memory", self.memory),
            )


def model_workload(model: str, sharding: str) -> ModelWorkload:
    """A hub id as it is, or a directory from the root: workers have another working directory.

    Raises:
        RequestError: the sharding is none.
    """
    from muster.spec import ModelWorkload

    parse_choice("--sharding", sharding, ("auto", "pipeline", "tensor"))
    path = Path(model)
    is_path = model.startswith((".", "~", "/")) or path.expanduser().is_dir()
    return ModelWorkload(model=absolute(path) if is_path else model, sharding=sharding)  # pyright: ignore[reportArgumentType]
