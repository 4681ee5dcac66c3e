"""Whether the coordinator lives, and whether its models decode."""

from __future__ import annotations

import anyio
import httpx
import msgspec
import pytest
from fake_backend import MODEL, FakeBackend
from serving import Served

from muster import __version__
from muster.api import health
from muster.coordinator.served import Readiness


def test_health(web: httpx.Client, server: Served) -> None:
    response = web.get(f"{server.url}/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok", "version": __version__})


def test_ready_while_every_model_decodes(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    one = backend.served[0]
    backend.served = (one, msgspec.structs.replace(one, name="other"))
    assert web.get(f"{server.url}/ready").status_code == 200
    backend.readiness["other"] = Readiness(model="other", ready=False, reason="rank 1 is silent")
    response = web.get(f"{server.url}/ready")
    assert response.status_code == 503
    found = {model["model"]: (model["ready"], model["reason"]) for model in response.json()["models"]}
    assert found == {MODEL: (True, ""), "other": (False, "rank 1 is silent")}
    assert web.get(f"{server.url}/ready?model={MODEL}").status_code == 200
    assert web.get(f"{server.url}/ready?model=other").status_code == 503
    assert web.get(f"{server.url}/ready?model=other&model={MODEL}").status_code == 503


def test_not_ready_without_a_model(web: httpx.Client, server: Served, backend: FakeBackend) -> None:
    backend.served = ()
    response = web.get(f"{server.url}/ready")
    assert (response.status_code, response.json()["reason"]) == (503, "no instance serves a model")


def test_a_model_that_is_not_there(web: httpx.Client, server: Served) -> None:
    response = web.get(f"{server.url}/ready?model=nobody")
    assert response.status_code == 404
    assert MODEL in response.json()["error"]["message"]


def test_a_probe_that_hangs_is_an_answer_too(
    web: httpx.Client, server: Served, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(model: str) -> Readiness:
        del model
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(health, "_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(backend, "probe", hang)
    response = web.get(f"{server.url}/ready")
    assert response.status_code == 503
    assert "did not decode within" in response.json()["models"][0]["reason"]
