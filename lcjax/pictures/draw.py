"""The pictures as PNG, and as SVG beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lcjax.attention import Landmark, Pattern
from lcjax.errors import InputError
from lcjax.evaluation.plots import GREY, canvas, format_count, series_style
from lcjax.generation.language_model import LanguageModel
from lcjax.pictures.answer import AnswerAttention, answer_attention
from lcjax.pictures.weights import mask_of
from lcjax.rope import Default, Rope

_MAX_COLUMNS = 480  # of a heat map; further tokens share columns


def mask_picture(
    pattern: Pattern, length: int, path: str | Path, *, heads: int = 1, seed: int = 0
) -> Path:
    """Draws which keys each query sees under `pattern`.

    Rows are queries and columns are keys; heads with equal masks share a panel. The colour is the
    distance at which the query sees the key. Visible keys without a defined distance are grey, and
    invisible keys are white. Under Landmark attention the columns of landmarks are white, as their
    keys only weight the blocks.
    """
    visible, distance = mask_of(pattern, length, heads=heads, seed=seed)
    groups: dict[bytes, list[int]] = {}
    for head in range(heads):
        key = visible[head].tobytes() + np.nan_to_num(distance[head], nan=-1).tobytes()
        groups.setdefault(key, []).append(head)
    head_groups = list(groups.values())
    name = Pattern.get_choice_name(type(pattern))
    max_distance = np.nanmax(distance) if np.isfinite(distance).any() else 1.0
    with canvas(Path(path), 1.2 + 4.2 * len(head_groups), 4.9) as figure:
        panels = figure.subplots(1, len(head_groups), squeeze=False)[0]
        for axes, heads in zip(panels, head_groups, strict=True):
            mask, distances = visible[heads[0]], distance[heads[0]]
            grey = np.ma.masked_where(~mask | np.isfinite(distances), mask)
            axes.imshow(grey, cmap="Greys", vmin=0, vmax=2, interpolation="nearest")
            image = axes.imshow(
                np.ma.masked_invalid(distances), cmap="cividis_r", vmin=0,
                vmax=max(max_distance, 1), interpolation="nearest",
            )  # fmt: skip
            axes.grid(False)
            share = np.tril(mask).sum() / (length * (length + 1) / 2)
            prefix = "" if len(head_groups) == 1 else f"heads {_ranges(heads)}: "
            axes.set_title(
                f"{prefix}{share:.0%} of what lies before is seen", fontsize=10, fontweight="normal"
            )
            axes.set_xlabel(_key_label(pattern))
        panels[0].set_ylabel("query")
        figure.suptitle(
            f"{name}, {format_count(length)} tokens", x=0.02, ha="left", fontweight="bold"
        )
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02)
        bar.set_label("distance at which it is seen")
        bar.outline.set_visible(False)
    return Path(path)


def _key_label(pattern: Pattern) -> str:
    if isinstance(pattern, Landmark):
        return f"key (each {pattern.block} end in a landmark, which only weighs them)"
    return "key"


def _ranges(heads: Sequence[int]) -> str:
    is_range = heads[-1] - heads[0] == len(heads) - 1 and len(heads) > 1
    return f"{heads[0]} to {heads[-1]}" if is_range else ", ".join(map(str, heads))


def rope_picture(
    ropes: Mapping[str, Rope],
    path: str | Path,
    *,
    head_dim: int = 128,
    trained: int = 4096,
    length: int = 16384,
    theta: float = 10_000.0,
) -> Path:
    """Draws the wavelengths of RoPE methods, their slow-down by pair, and agreement over distance.

    Left: the number of positions of a full turn of each pair; training never showed a full turn of
    a pair whose wavelength is beyond the trained length. Middle: how many times slower than plain
    RoPE a pair turns. Right: the mean of cos(distance * frequency) over all pairs, which is the
    cosine of equal queries and keys.

    Args:
      ropes: The methods by name.
      path: The PNG file; the SVG is written beside it.
      head_dim: The number of rotary channels.
      trained: The length of training.
      length: The length of the text, for methods that depend on it.
      theta: The base of the frequencies.
    """
    if not ropes:
        raise InputError("ropes: give at least one method, such as {'PI': Linear(factor=4)}")
    plain, _ = Default(theta=theta).frequencies(head_dim, length)
    distances = np.unique(np.round(np.geomspace(1, length, 240)).astype(int))
    with canvas(Path(path), 13.6, 4.4) as figure:
        panels = figure.subplots(1, 3)
        for index, (name, rope) in enumerate(ropes.items()):
            rope = rope.resolve(theta=theta, length=trained)
            if rope.learned:
                raise InputError(f"ropes: {name} is learned, and no checkpoint is drawn here")
            freq, scale = rope.frequencies(head_dim, length)
            freq = np.asarray(freq, np.float64)
            style = {k: v for k, v in series_style(index).items() if k != "marker"}
            agreement = np.cos(distances[:, None] * freq).mean(1) * scale**2
            panels[0].plot(2 * np.pi / freq, label=name, **style)
            panels[1].plot(np.asarray(plain, np.float64) / freq, **style)
            panels[2].plot(distances, agreement, **style, linewidth=1.1)
        _rope_axes(panels, trained, length)
        figure.legend(loc="outside upper left", ncols=6, fontsize=9)
    return Path(path)


def _rope_axes(panels, trained: int, length: int) -> None:
    panels[0].set_yscale("log", base=2)
    panels[1].set_yscale("log", base=2)
    panels[2].set_xscale("log", base=2)
    for axes, title, x, y in (
        (panels[0], "Wavelength", "pair of channels", "positions for a full turn"),
        (panels[1], "Slow-down", "pair of channels", "times slower than plain RoPE"),
        (panels[2], "Agreement over distance", "distance in tokens", "mean cosine"),
    ):
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.minorticks_off()
    for position, text in ((trained, "trained"), (length, "length")):
        mark = {"color": GREY, "linestyle": (0, (5, 4)), "linewidth": 1.2, "zorder": 1}
        panels[0].axhline(position, **mark)
        label = f"{text} {format_count(position)}"
        panels[0].annotate(
            label,
            (0, position),
            xytext=(2, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=GREY,
        )
        panels[2].axvline(position, **mark)


def attention_picture(
    lm: LanguageModel,
    prompt: str | Sequence[int],
    path: str | Path,
    *,
    head: int | None = None,
    **options,
) -> AnswerAttention:
    """Generates an answer and draws its attention; `options` are those of `answer_attention`.

    E2-LLM's figure 6 (arXiv 2401.06951): a row for every token of the answer, over the context.
    """
    _check_head(head, lm.config.num_heads)
    attention = answer_attention(lm, prompt, **options)
    draw_attention(attention, path, head=head)
    return attention


def draw_attention(
    attention: AnswerAttention, path: str | Path, *, head: int | None = None
) -> Path:
    """Draws one panel per layer, on one scale: the mean over heads, or one head.

    Several tokens of a long context share a column, which shows their largest weight. The colour
    scale is the square root, so that small weights are visible.
    """
    _check_head(head, attention.weights.shape[1])
    maps = attention.weights.mean(1) if head is None else attention.weights[:, head]
    step = -(-maps.shape[-1] // _MAX_COLUMNS)
    padded = np.pad(maps, [(0, 0), (0, 0), (0, -maps.shape[-1] % step)])
    maps = padded.reshape(*maps.shape[:2], -1, step).max(-1)
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=float(maps.max()) or 1.0)
    height = 0.5 + max(1.1, 0.17 * len(attention.tokens) + 0.6) * len(attention.layers)
    with canvas(Path(path), 9.6, min(height, 40)) as figure:
        panels = figure.subplots(len(attention.layers), 1, squeeze=False, sharex=True)[:, 0]
        for axes, layer, weights in zip(panels, attention.layers, maps, strict=True):
            image = axes.imshow(
                weights, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest",
                extent=(0, weights.shape[1] * step, len(attention.tokens), 0),
            )  # fmt: skip
            axes.axvline(attention.prompt, color="#D55E00", linewidth=1.2, linestyle=(0, (3, 1.5)))
            axes.set_title(f"layer {layer}", fontsize=10)
            names = [repr(text)[1:-1].replace("$", r"\$") for text in attention.tokens]
            axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=7.5)
            axes.grid(False)
        heads = "mean of all heads" if head is None else f"head {head}"
        panels[-1].set_xlabel(f"token of the context ({heads}; dashed: where the answer begins)")
        bar = figure.colorbar(image, ax=list(panels), pad=0.01)
        bar.set_label("attention weight")
        bar.outline.set_visible(False)
    return Path(path)


def _check_head(head: int | None, count: int) -> None:
    if head is not None and not 0 <= head < count:
        raise InputError(f"head={head} is none of the model's {count}, counted from 0")
