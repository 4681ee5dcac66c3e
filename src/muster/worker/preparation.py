"""What a runner is told first: which rank of what it becomes."""

from __future__ import annotations

from muster.rank_protocol import Prepare
from muster.worker.group_plan import steps_host
from muster.worker.site import Site
from muster.worker.watch import Place


def preparation(place: Place, site: Site, generation: str) -> Prepare:
    """The rank as it was placed, and where its files go; `generation` is the gateway that rank 0 of a model dials."""
    return Prepare(
        instance=place.id,
        attempt=place.attempt,
        rank=place.rank,
        world_size=place.world_size,
        workload=place.spec.workload,
        host=steps_host(place, site.info),
        directory=str(site.directory),
        generation=generation,
        shared_seconds=place.spec.deadlines.form_seconds,
        side_channel=place.spec.side_channel,
        layout=place.layout,
        environment=place.spec.environment,
        models_directory=str(site.copies or ""),
        offline=site.offline,
    )
