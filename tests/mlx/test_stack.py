"""What the ranks of a pipeline run that do not choose tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from lazy_models import build, config_of

from muster.model.load import LoadedModel
from muster.model.stack import step_model

pytestmark = pytest.mark.mlx


def stack_of(model: Any) -> Any:
    return step_model(cast("LoadedModel", SimpleNamespace(rank=1, model=model)))


class Layers(nn.Module):
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        del cache
        return mx.zeros((*inputs.shape, 8))


class WithHead(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner
        self.layers: list[Any] = []

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        raise AssertionError("the head was run")


class BesideVision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = Layers()


@pytest.mark.parametrize("inner", [Layers, BesideVision])
def test_a_rank_without_the_head_runs_the_layers_only(inner: type[nn.Module]) -> None:
    assert stack_of(WithHead(inner()))(mx.zeros((2, 3), mx.int32)).shape == (2, 3, 1)


def test_the_stack_beside_a_vision_tower_is_its_language_model() -> None:
    model = build(config_of("muse_spark"))
    assert not callable(model.model)
    assert stack_of(model)._stack is model.model.language_model
