"""Which files a rank needs: all of its own layers, everything outside of layers, nothing that it can do without."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muster.fetch.choice import is_offered, owners, shard_files, small_files


def index_of(layers: int, per_file: int) -> dict[str, str]:
    indexed = {
        f"model.layers.{n}.{part}": f"model-{1 + n // per_file}.safetensors" for n in range(layers) for part in "ab"
    }
    return {"model.embed_tokens.weight": "model-0.safetensors", **indexed, "lm_head.weight": "model-0.safetensors"}


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_a_shard_has_all_of_its_layers_and_what_is_outside(layers: int, per_file: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layers - 1))
    held = range(start, data.draw(st.integers(start + 1, layers)))
    indexed = index_of(layers, per_file)
    files = shard_files(indexed, set(indexed.values()), held, layers)
    for tensor, file in indexed.items():
        if ".layers." not in tensor or int(tensor.split(".")[2]) in held:
            assert file in files
    for file in files - {"model-0.safetensors"}:
        assert any(int(tensor.split(".")[2]) in held for tensor, where in indexed.items() if where == file)


def test_slices_need_every_file() -> None:
    indexed = index_of(4, 1)
    assert shard_files(indexed, set(indexed.values()), None, 4) == set(indexed.values())


def test_without_an_index_every_file_is_needed() -> None:
    assert shard_files({}, ["model.safetensors"], range(2), 4) == {"model.safetensors"}


def test_an_image_encoder_has_layers_of_its_own_which_everybody_needs() -> None:
    indexed = index_of(8, 1) | {f"vision.layers.{n}.w": f"model-vision-{n}.safetensors" for n in range(3)}
    files = shard_files(indexed, set(indexed.values()), range(6, 8), 8)
    assert {file for file in files if "vision" in file} == {f"model-vision-{n}.safetensors" for n in range(3)}
    assert "model-1.safetensors" not in files


def test_experts_stored_one_by_one_are_needed_whole() -> None:
    indexed = index_of(4, 1) | {"model.layers.3.mlp.experts.0.up_proj.weight": "model-4.safetensors"}
    assert shard_files(indexed, set(indexed.values()), range(1), 4) == set(indexed.values())


def test_small_files_are_those_of_a_model_in_its_own_directory() -> None:
    names = ["model.safetensors", "README.md", "config.json", "sub/config.json", "tokenizer.py", "a.jinja", ".x.json"]
    names += ["../config.json", "model.safetensors.index.json", "..\\x.json", "a\n.json"]
    assert small_files(names) == ("model.safetensors.index.json", "a.jinja", "config.json")
    assert "tokenizer.py" in small_files(names, code=True)
    assert not is_offered("../../etc/passwd.json")


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_every_file_is_downloaded_by_the_lowest_rank_that_needs_it(
    layers: int, per_file: int, data: st.DataObject
) -> None:
    indexed = index_of(layers, per_file)
    files = set(indexed.values())
    cuts = sorted({0, layers, *data.draw(st.sets(st.integers(0, layers)))}, reverse=True)
    spans = [range(start, stop) for stop, start in pairwise(cuts)]
    needed = [shard_files(indexed, files, span, layers) for span in spans]
    found = owners(needed)
    assert set(found) == set().union(*needed) == files
    for name, rank in found.items():
        assert next(one for one, names in enumerate(needed) if name in names) == rank
    assert found["model-0.safetensors"] == 0, "what all need comes from rank 0"
    assert owners([files] * 3) == dict.fromkeys(files, 0)


def test_nobody_owns_what_nobody_needs() -> None:
    assert owners([]) == owners([set(), set()]) == {}
    assert owners([{"a"}, {"a", "b"}, {"b", "c"}]) == {"a": 0, "b": 1, "c": 2}
