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
    caches = []  # of each layer: its slots and bytes after the text
    for number, kind in enumerate(cache_lib.layer_caches(config)):
        kind, slots = kind.after_prompt(length)
        arrays = kind.arrays(cache_lib.layer_shape(config.layer(number)), slots).values()
        caches.append((slots, sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)))
    memory = config.memory
    reads = itertools.repeat(False) if memory is None else memory.reader_layers(config.num_layers)
    groups: dict[tuple[int, bool], list[int]] = {}
    for layer, kind in enumerate(zip(config.kind_by_layer, reads)):
        groups.setdefault(kind, []).append(layer)
    lines = []
    for (_, reads), layers in groups.items():
        layer = config.layer(layers[0])
        held = _cache(layer, [caches[i] for i in layers], length)
        parts = [*_mixing(layer), held]
        if layer.experts is not None:
            parts.append(f"{layer.experts.top_k} of {layer.experts.count} experts")
        if memory is not None:
            parts.append("reads the context" if reads else "does not read the context")
        lines.append(f"layers {_ranges(layers)} ({len(layers)}): {'; '.join(parts)}")
    return lines


def _mixing(layer: ModelConfig) -> list[str]:
    """Returns how a layer mixes tokens: by attention, with its mask and positions, or a mixer."""
    if layer.mixer is not None:
        return [_described(layer.mixer), "no pattern, position or cache policy applies"]
    heads = f"{layer.num_heads} heads over {layer.num_kv_heads} of {layer.head_dim}"
    is_rotated = layer.position == "rope"
    positions = layer.rope.describe() if is_rotated else f"{layer.position} positions"
    if layer.rotates and layer.rotary_fraction < 1:
        positions += f" of {layer.rotary_fraction:.3g} of the {layer.rotary_share}"
    return [heads, _described(layer.pattern), positions]


def _cache(layer: ModelConfig, caches: Sequence[tuple[int, int]], length: int) -> str:
    """Returns what layers like `layer` hold of a text, and by which policy.

    Args:
      layer: one of the layers.
      caches: slots and bytes of each of them.
      length: tokens of the text.
    """
    if layer.keys_of is not None:
        return f"reads the cache of layer {layer.keys_of}"
    slots, sizes = zip(*caches, strict=True)
    least, most, size = min(slots), max(slots), sum(sizes)
    held = f"{least:,} to {most:,}" if least < most else f"{most:,}"
    text = f"cache of {held} of {length:,} tokens" if most else "a state of fixed size"
    if layer.cache is not None and layer.mixer is None:
        plain = cache_lib.layer_cache(layer.replace(cache=None))
        name = layer.cache.get_choice_name(type(layer.cache))
        applies = cache_lib.layer_cache(layer) != plain
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
