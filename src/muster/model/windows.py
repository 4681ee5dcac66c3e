"""Which layers of a model keep a window only, or nothing of their own, as mlx-lm's `make_cache` decides it. Pure."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from muster.errors import ModelError
from muster.model.config import whole
from muster.model.mlx_source import Source
from muster.model.reading import shown

#: What configs call the size of a window; the first that is there counts.
_SIZES: Final = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
_PATTERN: Final = "sliding_window_pattern"
#: Layers that look back at everything.
_FULL: Final = ("full_attention", "attention")
#: Every nth layer looks back at everything where neither kinds nor a pattern say so.
#: Source: gpt_oss.py, step3p5.py, olmo3.py, muse_glimmer.py, spark2_5.py of mlx-lm.
_EVERY: Final = {"gpt_oss": 2, "step3p5": 2, "olmo3": 4, "muse_glimmer": 4, "spark2_5": 4}
#: All of its layers that attend keep a window. Source: recurrent_gemma.py of mlx-lm.
_ALWAYS: Final = frozenset({"recurrent_gemma"})


class Windows(msgspec.Struct, frozen=True, kw_only=True):
    """How an architecture says which layers keep a window; the numbers hold where a config does not say.

    `kinds`: it reads `layer_types`. `patterned`: it reads a pattern, `pattern`, and that is every nth layer.
    `shared`: so many of its last layers look at what earlier ones keep.
    """

    size: int | None
    kinds: bool
    patterned: bool
    pattern: int | None
    shared: int | None


def windows_of(source: Source, module: str) -> Windows:
    """What the module's source says of its windows."""
    sizes = (source.whole_default_of(module, name) for name in _SIZES)
    return Windows(
        size=next((size for size in sizes if size is not None), None),
        kinds=source.has_field(module, "layer_types"),
        patterned=source.has_field(module, _PATTERN),
        pattern=source.whole_default_of(module, _PATTERN),
        shared=source.whole_default_of(module, "num_kv_shared_layers")
        if source.has_field(module, "num_kv_shared_layers")
        else 0,
    )


def window_tokens(text: dict[str, Any], name: str, windows: Windows, number: int) -> int:
    """How many tokens that layer of the architecture `name` keeps; 0 for all of them.

    Raises:
        ModelError: a value of the config is of another kind than it must be.
    """
    size = whole(text, *_SIZES)
    if size is None and not any(one in text for one in _SIZES):
        size = windows.size
    return size if size is not None and _slides(text, name, windows, number) else 0


def is_shared(text: dict[str, Any], windows: Windows, number: int, layers: int) -> bool:
    """Whether the layer keeps nothing, and looks at what an earlier one of its kind keeps.

    Raises:
        ModelError: a value of the config is of another kind than it must be.
    """
    given = "num_kv_shared_layers" in text
    last = whole(text, "num_kv_shared_layers") if given else windows.shared
    return bool(windows.shared != 0 and last and 0 < layers - last <= number)


def _slides(text: dict[str, Any], name: str, windows: Windows, number: int) -> bool:
    if name in _ALWAYS:
        return True
    if windows.kinds and (kinds := _entries(text, "layer_types")):
        return number < len(kinds) and kinds[number] not in _FULL
    if hybrid := _entries(text, "hybrid_layer_pattern"):
        return number < len(hybrid) and hybrid[number] == 1
    if chosen := _entries(text, "sliding_window_layers"):
        return number in chosen
    if windows.patterned:
        return _by_pattern(text.get(_PATTERN, windows.pattern), number)
    every = _EVERY.get(name)
    return every is not None and (number + 1) % every != 0


def _by_pattern(pattern: object, number: int) -> bool:
    """A number, the last of so many is full; or letters that are repeated, "L" for a window."""
    if pattern is None or pattern == "":
        return False
    if isinstance(pattern, str):
        if set(pattern) - set("LG"):
            raise ModelError(
                f"config.json has {_PATTERN} {shown(pattern)}, expected the letters L and G",
                remedy="repair config.json",
            )
        return pattern[number % len(pattern)] == "L"
    every = whole({_PATTERN: pattern}, _PATTERN)
    return every is not None and (number + 1) % every != 0


def _entries(text: dict[str, Any], name: str) -> list[object]:
    value = text.get(name)
    return cast("list[object]", value) if isinstance(value, list) else []
