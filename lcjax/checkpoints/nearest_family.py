"""Which model family of transformers expresses a decoder, and what of it none can."""

import dataclasses
from typing import NamedTuple

from lcjax.attention import Causal
from lcjax.checkpoints.families import (
    FAMILIES,
    Family,
    shared_keys,
    windows,
)
from lcjax.models.model_config import ModelConfig
from lcjax.rope import Default, Linear, NoRotation

# Fields other than sizes that distinguish families; Llama has the default of each.
_NEUTRAL = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.name
    in (
        *("norm", "norm_bias", "norm_plus_one", "qk_norm", "activation", "block"),
        *("gated_mlp", "query_scale", "query_scale_length", "query_scale_layers"),
        *("qkv_bias", "out_bias", "mlp_bias", "head_bias", "rotary_fraction", "embedding_scale"),
        *("residual_scale", "attention_scale", "attention_soft_cap", "logit_scale"),
        *("logit_soft_cap", "position", "attention_sinks", "attention_gate"),
        *("rotary_share", "value_norm", "values_from_keys", "layer_scale", "layer_embedding"),
    )
}


class NearestFamily(NamedTuple):
    """The name of a family in `FAMILIES`, and what it cannot express of a config."""

    name: str
    differences: list[str]


def family_of(config: ModelConfig) -> NearestFamily:
    """Returns the family that computes `config`, or the nearest one, and their differences.

    If several families compute it, the result is the checkpoint's own (`ModelConfig.family`), else
    the first of the table.
    """
    if len(config.kinds) == 1:
        config = config.layer(0)
    stated = FAMILIES.get(config.family)
    if stated is not None and not any(_differences(config, stated)):
        return NearestFamily(config.family, [])
    wrong = {name: _differences(config, family) for name, family in FAMILIES.items()}
    # Windows and ropes do not change the weights, so a family that differs in them alone is nearer.
    nearest = min(wrong, key=lambda name: tuple(map(len, wrong[name])))
    fields, layers = wrong[nearest]
    return NearestFamily(nearest, fields + layers)


def _expert_differences(config: ModelConfig, family: Family) -> list[str]:
    """Lists fields of experts, neither the default nor set to this value by a key of the family."""
    experts = config.experts
    if experts is None:  # in no layer
        return [] if not family.experts or family.dense else ["experts=None"]
    if not family.experts:
        return [f"experts={experts}"]
    free = {field for key in family.experts for field in key.fields}
    required = {field.name: field.default for field in dataclasses.fields(experts)}
    required |= family.fixed_expert_fields(config.mlp_width)
    wrong = [
        f"experts.{name}={getattr(experts, name)!r}"
        for name, value in required.items()
        if name not in free and getattr(experts, name) != value
    ]
    for key in family.experts:
        first, *others = key.fields
        value = key.write(getattr(experts, first), config)
        if value is None and key.default is not None:
            wrong.append(f"experts.{first}=None")
        others = {name: getattr(experts, name) for name in others}
        wrong += [f"experts.{name}={other}" for name, other in others.items() if other != value]
    dense = [config.layer(i).experts is None for i in range(config.num_layers)]
    stated = None if family.dense is None else family.dense.write(dense)
    if any(dense) and not (
        stated and family.dense.read({"num_hidden_layers": len(dense)} | stated) == dense
    ):
        wrong.append("layers.dense=True")
    return wrong


def _mixer_differences(config: ModelConfig, family: Family) -> list[str]:
    """Lists mixers of layers, unless all are one that the keys of the family describe."""
    mixers = config.mixers
    names = {field for key in family.mixer for field in key.fields}
    fits = len(mixers) == 1 and all(
        field.name in names
        or getattr(mixer, field.name) == family.fixed_mixer.get(field.name, field.default)
        for mixer in mixers
        for field in dataclasses.fields(mixer)
    )
    wrong = [] if not mixers or (family.mixer and fits) else [f"mixer={m}" for m in mixers]
    if family.mixed and not mixers:
        wrong.append("mixer=None in all layers")
    elif family.mixed and all(layer.mixer for layer, _ in config.layer_counts):
        wrong.append("mixer in all layers")
    return wrong


def _norm_differences(config: ModelConfig, family: Family) -> list[str]:
    """Lists the places of norms in layers that differ from those of the family."""
    place = family.fixed.get("norm_place", "before")
    wrong = (
        layer.norm_place
        for layer, _ in config.layer_counts
        if layer.norm_place != ((layer.mixer and family.mixer_norm_place) or place)
    )
    return [f"norm_place={name!r}" for name in dict.fromkeys(wrong)]


def _head_differences(config: ModelConfig, family: Family) -> list[str]:
    """Lists sizes of heads of layers that the family cannot express."""
    names = ("head_dim", "num_kv_heads", "rotary_fraction", "values_from_keys")
    layers = list(map(config.layer, range(config.num_layers)))
    has_window = [family.full_heads and size is not None for size in windows(config)]
    wrong = []
    for kind in (False, True):
        of_kind = [layer for layer, other in zip(layers, has_window, strict=True) if other == kind]
        for name in names:
            values = dict.fromkeys(getattr(layer, name) for layer in of_kind if not layer.mixer)
            if len(values) > 1 or (name == "values_from_keys" and True in values and kind):
                wrong.append(f"layers.{name}={', '.join(map(str, values))}")
    if family.full_heads and has_window[-1:] == [True]:
        wrong.append(f"layers.pattern={layers[-1].pattern} in the last layer")
    count = sum(layer.keys_of is not None for layer in layers) if family.full_heads else 0
    widths = {layer.mlp_width for layer in layers if layer.keys_of is not None}
    double = widths == {2 * config.mlp_width}
    expected = shared_keys(has_window, count)
    for layer, source in zip(layers, expected, strict=True):
        width = config.mlp_width * (2 if double and source is not None else 1)
        for name, value in {"keys_of": source, "mlp_width": width}.items():
            if getattr(layer, name) != value:
                wrong.append(f"layers.{name}={getattr(layer, name)}")
    return list(dict.fromkeys(wrong))


def _differences(config: ModelConfig, family: Family) -> tuple[list[str], list[str]]:
    """Lists what the family cannot express: values of fields; patterns and ropes of layers."""
    required = _NEUTRAL | family.fixed_fields(config.width)
    required.pop("norm_place", None)  # that of each layer counts (`_norm_differences`)
    for key in family.keys:
        value = getattr(config, key.fields[0])
        if key.values is not None and value not in key.values:
            continue
        for field in key.fields:  # the first may have any value, which the others must equal
            required[field] = value
    if family.rotary_fraction is not None or family.full_heads:
        del required["rotary_fraction"]
    if family.full_heads:
        del required["values_from_keys"]
    if family.query_scale != "none" and config.query_scale:
        required["query_scale"] = config.query_scale
        required["query_scale_length"] = config.query_scale_length
        of_rope = getattr(config.rope, "original_length", None)
        if family.query_scale == "layers":
            required["query_scale_layers"] = "unrotated"
        elif of_rope is not None:  # transformers has one key for both
            required["query_scale_length"] = of_rope
    fields = [f"{k}={getattr(config, k)!r}" for k, v in required.items() if getattr(config, k) != v]
    fields += _expert_differences(config, family) + _mixer_differences(config, family)
    fields += _norm_differences(config, family) + _head_differences(config, family)
    if not family.own_head_dim and config.head_dim * config.num_heads != config.width:
        fields.append(f"head_dim={config.head_dim}")
    wrong = [
        f"{'layers.' if config.layers else ''}pattern={pattern}"
        for pattern in config.patterns
        if not isinstance(pattern, Causal)
        and not (family.windows != "none" and isinstance(pattern, family.local.pattern))
    ]
    sizes = windows(config)
    if not wrong and len({*sizes} - {None}) > 1:
        wrong.append(f"layers of windows {sorted({*sizes} - {None})}")
    if family.windows == "all" and len({*sizes}) > 1:
        wrong.append("layers with and without a window")
    ropes = {layer.rope for layer, _ in config.layer_counts}
    rotating = {rope for rope in ropes if not isinstance(rope, NoRotation)}
    if family.local_theta is not None:
        by_type: dict[bool, set] = {}
        for index, size in enumerate(sizes):
            by_type.setdefault(size is None, set()).add(config.layer(index).rope)
        other_ropes = any(len(kinds) > 1 for kinds in by_type.values())
    else:
        by_layer = family.unrotated_layers == "zero theta"  # which differ in their base alone
        forms = {dataclasses.replace(rope, theta=1e4) if by_layer else rope for rope in rotating}
        other_ropes = len(forms) > 1
    if family.rope_types is not None:
        form = config.rope.to_hf(config.rotary_dim)["rope_parameters"]
        other_ropes |= form["rope_type"] not in family.rope_types
    if family.full_heads:  # transformers has two methods for a share of frequencies
        of_shares = {layer.rope for layer, _ in config.layer_counts if layer.rotary_fraction < 1}
        other_ropes |= not all(isinstance(rope, (Default, Linear)) for rope in of_shares)
    if other_ropes or not _rotates(config, family, sizes):
        wrong.append(f"layers of ropes {', '.join(sorted(map(repr, ropes)))}")
    return fields, wrong


def _rotates(config: ModelConfig, family: Family, sizes: list[int | None]) -> bool:
    """Returns whether a family of models can rotate those layers of `config` that rotate.

    Args:
      config: the model.
      family: the family.
      sizes: the window of each layer.
    """
    rotated = [not isinstance(config.layer(i).rope, NoRotation) for i in range(config.num_layers)]
    has_window = [size is not None for size in sizes]
    return {
        "none": all(rotated),
        **dict.fromkeys(("listed", "zero theta"), True),
        "full": rotated == has_window,
        "full beside windows": rotated == has_window or (all(rotated) and not any(has_window)),
        "null theta": len({x for i, x in enumerate(rotated) if not config.layer(i).mixer}) < 2,
    }[family.unrotated_layers]
