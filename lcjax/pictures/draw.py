"""The pictures as PNG, and as SVG beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lcjax.attention import Landmark, Pattern
from lcjax.errors import InputError
from lcjax.evaluation.report.plots import GREY, canvas, look, tokens
from lcjax.generation.language_model import LanguageModel
from lcjax.pictures.answer import AnswerAttention, answer_attention
from lcjax.pictures.weights import mask_of
from lcjax.rope import Default, Rope

_COLUMNS = 480  # of a heat map; more tokens than that are taken together


def mask_picture(
    pattern: Pattern, length: int, path: str | Path, *, heads: int = 1, seed: int = 0
) -> Path:
    """Who sees whom under `pattern`: a row a query, a column a key, one panel for equal heads.

    The colour is the distance at which the query sees the key; grey where it is seen and the
    pattern says no distance, white where it is not. Under Landmark attention the columns of
    landmarks are white: their keys weigh the blocks, nothing is read from them.
    """
    seen, distance = mask_of(pattern, length, heads=heads, seed=seed)
    groups: dict[bytes, list[int]] = {}
    for head in range(heads):
        key = seen[head].tobytes() + np.nan_to_num(distance[head], nan=-1).tobytes()
        groups.setdefault(key, []).append(head)
    shown = list(groups.values())
    name = Pattern.get_choice_name(type(pattern))
    top = np.nanmax(distance) if np.isfinite(distance).any() else 1.0
    with canvas(Path(path), 1.2 + 4.2 * len(shown), 4.9) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, own in zip(panels, shown, strict=True):
            grey = np.ma.masked_where(~seen[own[0]] | np.isfinite(distance[own[0]]), seen[own[0]])
            axes.imshow(grey, cmap="Greys", vmin=0, vmax=2, interpolation="nearest")
            picture = axes.imshow(
                np.ma.masked_invalid(distance[own[0]]), cmap="cividis_r", vmin=0,
                vmax=max(top, 1), interpolation="nearest",
            )  # fmt: skip
            axes.grid(False)
            before = np.tril(seen[own[0]]).sum() / (length * (length + 1) / 2)
            which = "" if len(shown) == 1 else f"heads {_ranges(own)}: "
            title = f"{which}{before:.0%} of what lies before is seen"
            axes.set_title(title, fontsize=10, fontweight="normal")
            axes.set_xlabel(_keys(pattern))
        panels[0].set_ylabel("query")
        figure.suptitle(f"{name}, {tokens(length)} tokens", x=0.02, ha="left", fontweight="bold")
        bar = figure.colorbar(picture, ax=list(panels), shrink=0.8, pad=0.02)
        bar.set_label("distance at which it is seen")
        bar.outline.set_visible(False)
    return Path(path)


def _keys(pattern: Pattern) -> str:
    if isinstance(pattern, Landmark):
        return f"key (each {pattern.block} end in a landmark, which only weighs them)"
    return "key"


def _ranges(heads: Sequence[int]) -> str:
    whole = heads[-1] - heads[0] == len(heads) - 1 and len(heads) > 1
    return f"{heads[0]} to {heads[-1]}" if whole else ", ".join(map(str, heads))


def rope_picture(
    ropes: Mapping[str, Rope],
    path: str | Path,
    *,
    head_dim: int = 128,
    trained: int = 4096,
    length: int = 16384,
    theta: float = 10_000.0,
) -> Path:
    """How methods turn positions: wavelengths, slow-down by pair, and agreement over distance.

    Left: positions that a full turn of each pair takes; a pair whose wavelength is beyond the
    trained length has never been seen whole. Middle: how many times slower than plain RoPE a pair
    turns. Right: mean of cos(distance * frequency) over all pairs, what equal queries and keys
    agree by.
    """
    if not ropes:
        raise InputError("ropes: give at least one method, such as {'PI': Linear(factor=4)}")
    plain, _ = Default(theta=theta).frequencies(head_dim, length)
    far = np.unique(np.round(np.geomspace(1, length, 240)).astype(int))
    with canvas(Path(path), 13.6, 4.4) as figure:
        panels = figure.subplots(1, 3)
        for index, (name, rope) in enumerate(ropes.items()):
            rope = rope.resolve(theta=theta, length=trained)
            if rope.learned:
                raise InputError(f"ropes: {name} is learned, and no checkpoint is drawn here")
            freq, scale = rope.frequencies(head_dim, length)
            freq = np.asarray(freq, np.float64)
            style = {k: v for k, v in look(index).items() if k != "marker"}
            agreement = np.cos(far[:, None] * freq).mean(1) * scale**2
            panels[0].plot(2 * np.pi / freq, label=name, **style)
            panels[1].plot(np.asarray(plain, np.float64) / freq, **style)
            panels[2].plot(far, agreement, **style, linewidth=1.1)
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
    for place, text in ((trained, "trained"), (length, "length")):
        mark = {"color": GREY, "linestyle": (0, (5, 4)), "linewidth": 1.2, "zorder": 1}
        panels[0].axhline(place, **mark)
        panels[0].annotate(
            f"{text} {tokens(place)}", (0, place), xytext=(2, 3), textcoords="offset points",
            fontsize=8.5, color=GREY,
        )  # fmt: skip
        panels[2].axvline(place, **mark)


def attention_picture(
    lm: LanguageModel,
    prompt: str | Sequence[int],
    path: str | Path,
    *,
    head: int | None = None,
    **options,
) -> AnswerAttention:
    """Writes an answer and draws what it looks at; options as of `answer_attention`.

    E2-LLM's figure 6 (arXiv 2401.06951): a row for every token of the answer, over the context.
    """
    _check_head(head, lm.config.num_heads)
    found = answer_attention(lm, prompt, **options)
    draw_attention(found, path, head=head)
    return found


def draw_attention(found: AnswerAttention, path: str | Path, *, head: int | None = None) -> Path:
    """One panel a layer, on one scale; the mean over heads, or one of them.

    Of a long context several tokens share a column, which shows their largest weight. Colours
    follow the square root, so that small weights are seen as well.
    """
    _check_head(head, found.weights.shape[1])
    maps = found.weights.mean(1) if head is None else found.weights[:, head]
    step = -(-maps.shape[-1] // _COLUMNS)
    filled = np.pad(maps, [(0, 0), (0, 0), (0, -maps.shape[-1] % step)])
    maps = filled.reshape(*maps.shape[:2], -1, step).max(-1)
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=float(maps.max()) or 1.0)
    high = 0.5 + max(1.1, 0.17 * len(found.tokens) + 0.6) * len(found.layers)
    with canvas(Path(path), 9.6, min(high, 40)) as figure:
        panels = figure.subplots(len(found.layers), 1, squeeze=False, sharex=True)[:, 0]
        for axes, layer, picture in zip(panels, found.layers, maps, strict=True):
            drawn = axes.imshow(
                picture, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest",
                extent=(0, picture.shape[1] * step, len(found.tokens), 0),
            )  # fmt: skip
            axes.axvline(found.prompt, color="#D55E00", linewidth=1.2, linestyle=(0, (3, 1.5)))
            axes.set_title(f"layer {layer}", fontsize=10)
            names = [repr(text)[1:-1].replace("$", r"\$") for text in found.tokens]
            axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=7.5)
            axes.grid(False)
        what = "mean of all heads" if head is None else f"head {head}"
        panels[-1].set_xlabel(f"token of the context ({what}; dashed: where the answer begins)")
        bar = figure.colorbar(drawn, ax=list(panels), pad=0.01)
        bar.set_label("attention weight")
        bar.outline.set_visible(False)
    return Path(path)


def _check_head(head: int | None, count: int) -> None:
    if head is not None and not 0 <= head < count:
        raise InputError(f"head={head} is none of the model's {count}, counted from 0")
