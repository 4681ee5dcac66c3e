"""A worker that was told to give nothing: neither what it holds, nor what it downloads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from muster.bus import Endpoint
from muster.peer_protocol import FollowBlob
from muster.spec import NodeId
from muster.worker.service import Worker
from muster.worker.settings import WorkerSettings

DEMO = Path(__file__).parents[3] / "src" / "muster" / "demo" / "model"


@pytest.mark.parametrize("share", [True, False])
def test_what_a_worker_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    shutil.copytree(DEMO, tmp_path / "models" / "tiny")
    worker = Worker(
        WorkerSettings(
            node=NodeId("a"),
            coordinators=(Endpoint(host="127.0.0.1", port=9),),
            directory=tmp_path / "own",
            models=(tmp_path / "models",),
            share=share,
        )
    )
    assert [held.shareable for held in worker._held()] == [share]
    assert (FollowBlob in worker._peers._handlers) is share
