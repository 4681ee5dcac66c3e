"""Where to put an instance: pure decisions from the state, from what nodes tell, and from what a model needs."""

from muster.placement.deciding import alternatives, decide, error_of, place
from muster.placement.rooms import cluster_of, why_not
from muster.placement.ways import rank_memory_bytes
from muster.placement.words import (
    MODEL_RANK_BYTES,
    RANK_BYTES,
    Candidate,
    Cluster,
    Placement,
    Refusal,
    size,
)
from muster.spec import Shortfall

__all__ = [
    "MODEL_RANK_BYTES",
    "RANK_BYTES",
    "Candidate",
    "Cluster",
    "Placement",
    "Refusal",
    "Shortfall",
    "alternatives",
    "cluster_of",
    "decide",
    "error_of",
    "place",
    "rank_memory_bytes",
    "size",
    "why_not",
]
