"""The models that clients can name, for OpenAI's client and for Anthropic's."""

from __future__ import annotations

import openai
import pytest
from fake_backend import MODEL
from openai_kit import asking, refusal

VERSION = {"anthropic-version": "2023-06-01"}


def test_the_models_by_name() -> None:
    with asking() as kit:
        models = kit.client.models.list().data
        model = kit.client.models.retrieve(MODEL)
    assert [entry.id for entry in models] == [MODEL]
    assert (model.id, model.object, model.created, model.owned_by) == (MODEL, "model", 1_700_000_000, "muster")


def test_no_model_is_an_empty_list() -> None:
    with asking() as kit:
        kit.backend.served = ()
        assert kit.http.get("/v1/models").json() == {"object": "list", "data": []}
        assert "none" in refusal(kit.http.get("/v1/models/x"), 404)[1]


def test_an_unknown_model_names_those_that_exist() -> None:
    with asking() as kit:
        with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
            kit.client.models.retrieve("other/model")
        assert caught.value.code == "model_not_found"


def test_anthropics_client_gets_its_own_shape() -> None:
    with asking() as kit:
        page = kit.http.get("/v1/models", headers=VERSION).json()
        one = kit.http.get(f"/v1/models/{MODEL}", headers=VERSION).json()
        missing = kit.http.get("/v1/models/x/y", headers=VERSION)
    assert [entry["type"] for entry in page["data"]] == ["model"]
    assert (page["first_id"], page["has_more"]) == (MODEL, False)
    assert one["id"] == MODEL
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"
    assert MODEL in missing.json()["error"]["message"]
