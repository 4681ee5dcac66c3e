"""Placement of the next attempt of an instance. Pure."""

from __future__ import annotations

import re

import msgspec

from muster.known import Known
from muster.placement.deciding import decide
from muster.placement.words import Placement, Refusal
from muster.spec import Failure
from muster.state import Instance, State

_NOTHING = Known()
#: A number with its unit, in a message.
_NUMBER = re.compile(r"\d+(\.\d+)?( [MG]iB)?")


def place_again(instance: Instance, state: State, known: Known = _NOTHING) -> Placement | Refusal:
    """With as many ranks as before; where there is no room for those, and nobody asked for them, with others."""
    spec = msgspec.structs.replace(instance.spec, auto_ranks=False)
    found = decide(spec, state, known, instance.needs, advise=False)
    if isinstance(found, Placement) or not instance.spec.auto_ranks:
        return found
    anew = msgspec.structs.replace(spec, ranks=max(1, len(spec.nodes)), auto_ranks=True)
    other = decide(anew, state, known, instance.needs, advise=False)
    return other if isinstance(other, Placement) else found


def same_refusal(one: Failure, other: Failure) -> bool:
    """Whether both say the same but for numbers: what a machine has available changes with every heartbeat."""
    if one.phase is not other.phase or one.kind != other.kind:
        return False
    return _NUMBER.sub("", one.message) == _NUMBER.sub("", other.message)
