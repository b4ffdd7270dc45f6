"""What applies to each layer of a model: its mask, positions, cache and context."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from lcjax.models import ModelConfig
from lcjax.models import cache as cache_lib


def layer_lines(config: ModelConfig, length: int) -> list[str]:
    """Returns a line for each kind of layers: what it computes, and which settings reach it.

    Position methods, patterns, cache policies and memories change layers with attention that they
    are defined for. The lines are read off the layers that the model builds, so they say which.

    Args:
      config: the model.
      length: tokens of the text whose cache is counted.
    """
    memory = config.memory
    reads = itertools.repeat(False) if memory is None else memory.reader_layers(config.num_layers)
    groups: dict[tuple[int, bool], list[int]] = {}
    for layer, kind in enumerate(zip(config.kind_by_layer, reads)):
        groups.setdefault(kind, []).append(layer)
    return [
        f"layers {_ranges(layers)} ({len(layers)}): {_layer(config, layers, length, reads)}"
        for (_, reads), layers in groups.items()
    ]


def _layer(config: ModelConfig, layers: Sequence[int], length: int, reads: bool) -> str:
    """Returns what `layers`, which are alike, have in common."""
    layer = config.layer(layers[0])
    if layer.mixer is None:
        parts = [
            f"{layer.num_heads} heads over {layer.num_kv_heads} of {layer.head_dim}",
            _described(layer.pattern),
            layer.rope.describe() if layer.position == "rope" else f"{layer.position} positions",
            _cache(config, layers, length),
        ]
    else:
        parts = [_described(layer.mixer), "no pattern, position or cache policy applies"]
        parts.append(_cache(config, layers, length))
    if layer.experts is not None:
        parts.append(f"{layer.experts.top_k} of {layer.experts.count} experts")
    if config.memory is not None:
        parts.append("reads the context" if reads else "does not read the context")
    return "; ".join(parts)


def _cache(config: ModelConfig, layers: Sequence[int], length: int) -> str:
    """Returns what `layers` hold of a text of `length` tokens, and by which policy."""
    kinds, shape = cache_lib.layer_caches(config), cache_lib.layer_shape(config)
    ends = [kinds[layer].after_prompt(length) for layer in layers]
    size = sum(
        math.prod(array.shape) * array.dtype.itemsize
        for kind, slots in ends
        for array in kind.arrays(shape, slots).values()
    )
    slots = sorted({slots for _, slots in ends})
    held = f"{slots[0]:,} to {slots[-1]:,}" if len(slots) > 1 else f"{slots[0]:,}"
    text = f"cache of {held} of {length:,} tokens" if slots[-1] else "a state of fixed size"
    layer = config.layer(layers[0])
    if config.cache is not None and layer.mixer is None:
        plain = cache_lib.layer_cache(layer.replace(cache=None))
        applies = cache_lib.layer_cache(layer) != plain
        name = config.cache.get_choice_name(type(config.cache))
        text += f" by {name}" if applies else f", to which {name} does not apply"
    return f"{text}, {size / 1e9:.3g} GB a text"


def _described(setting: Any) -> str:
    """Returns the type of a setting and its fields that differ from their defaults."""
    values = {
        field.name: getattr(setting, field.name)
        for field in dataclasses.fields(setting)
        if getattr(setting, field.name) != field.default
    }
    words = ", ".join(f"{name}={value}" for name, value in values.items())
    return setting.get_choice_name(type(setting)) + (f" ({words})" if words else "")


def _ranges(numbers: Sequence[int]) -> str:
    """Returns numbers in ascending order as text such as `0-2, 4-6`; of many, the first."""
    runs = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    spans = [[number for _, number in run] for _, run in runs]
    words = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return ", ".join(words[:4] + (["..."] if len(words) > 4 else []))
