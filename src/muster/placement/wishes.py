"""What is wrong with a wish by itself, whatever nodes there are. Pure."""

from __future__ import annotations

from muster.links import is_host, is_network
from muster.needs import ModelNeeds
from muster.placement.words import Refusal
from muster.spec import GroupWorkload, InstanceSpec, ModelWorkload


def fault_of(wish: InstanceSpec, model: ModelNeeds | None) -> Refusal | None:
    """The field that cannot be, its value, and what to give instead; `None` where all can."""
    if wish.auto_ranks and not isinstance(wish.workload, ModelWorkload):
        return Refusal(
            message="auto_ranks is set, and only a model's size says how many ranks it takes",
            remedies=("give a number of ranks",),
        )
    if isinstance(wish.workload, GroupWorkload) and wish.ranks < 2:
        return Refusal(
            message="a group needs at least 2 ranks, and 1 was asked for", remedies=("use --ranks 2 or more",)
        )
    return _backend_fault(wish) or _split_fault(wish, model) or _context_fault(wish, model) or _given_fault(wish)


def _backend_fault(wish: InstanceSpec) -> Refusal | None:
    if wish.ranks > 1 or wish.auto_ranks or wish.backend in ("auto", "ring"):
        return None
    return Refusal(
        message=f"backend is {wish.backend} and ranks is 1, and a rank by itself forms no group",
        remedies=("use --ranks 2 or more", "leave --backend out"),
    )


def _split_fault(wish: InstanceSpec, model: ModelNeeds | None) -> Refusal | None:
    split = list(wish.split)
    if not split:
        return None
    if not isinstance(wish.workload, ModelWorkload):
        return Refusal(message=f"split is {split}, and only a model has layers", remedies=("leave --split out",))
    if wish.workload.sharding == "tensor":
        return Refusal(
            message=f"split is {split} and sharding is tensor, where every rank runs all layers",
            remedies=("leave --split out", "use --sharding pipeline"),
        )
    if wish.auto_ranks:
        return Refusal(
            message=f"split is {split} and the number of ranks is left open, and it has one number per rank",
            remedies=(f"use --ranks {len(split)}", "leave --split out"),
        )
    layers = "" if model is None else f" that add up to {len(model.layers)}"
    if len(split) != wish.ranks or min(split) < 1 or (model is not None and sum(split) != len(model.layers)):
        return Refusal(
            message=f"split is {split}; it must have {wish.ranks} numbers above 0, one per rank,{layers}".rstrip(","),
            remedies=(f"give {wish.ranks} numbers{layers}, rank 0 first", "leave --split out"),
        )
    return None


def _context_fault(wish: InstanceSpec, model: ModelNeeds | None) -> Refusal | None:
    if model is None or not isinstance(wish.workload, ModelWorkload) or model.context_tokens is None:
        return None
    asked = wish.workload.context_tokens
    if asked is None or asked <= model.context_tokens:
        return None
    return Refusal(
        message=f"context_tokens is {asked}, and {model.model} takes {model.context_tokens} at most",
        remedies=(f"use --context {model.context_tokens}",),
    )


def _given_fault(wish: InstanceSpec) -> Refusal | None:
    if wish.network and not is_network(wish.network):
        return Refusal(
            message=f"network is {wish.network!r}; it must be an IPv4 network as CIDR",
            remedies=("write it as in --network 10.0.1.0/24 (muster nodes NODE shows those of a node)",),
        )
    if wish.addresses and len(wish.addresses) != wish.ranks:
        return Refusal(
            message=f"addresses has {len(wish.addresses)} entries for {wish.ranks} ranks",
            remedies=("give one entry per rank, rank 0 first",),
        )
    for rank, hosts in enumerate(wish.addresses):
        for index, host in enumerate(hosts):
            if not is_host(host):
                return Refusal(
                    message=f"addresses[{rank}][{index}] is {host!r}; it must be an IPv4 address of rank {rank}'s node",
                    remedies=("give one such as 10.0.1.5 (muster nodes NODE shows those of a node)",),
                )
    rows = [len(row) for row in wish.devices]
    if wish.devices and rows != [wish.ranks] * wish.ranks:
        return Refusal(
            message=f"devices has rows of {rows} entries; it must have {wish.ranks} rows of {wish.ranks}",
            remedies=("give one row per rank, with one entry per rank",),
        )
    if wish.devices and wish.backend == "ring":
        return Refusal(
            message="devices are given and backend is ring, which has none",
            remedies=("use --backend jaccl", "leave the devices out"),
        )
    return None
