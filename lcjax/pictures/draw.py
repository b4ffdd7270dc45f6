"""Draws the pictures, as PNG and SVG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import Landmark, Pattern
from lcjax.errors import INT32_MAX, InputError, check_integer, import_package
from lcjax.evaluation.plots import COLOURS, GREY, canvas, check_picture, series_style
from lcjax.generation.language_model import LanguageModel
from lcjax.pictures.answer import AnswerAttention, answer_attention
from lcjax.pictures.weights import mask_of
from lcjax.rope import Default, NoRotation, Positions, Rope
from lcjax.storage import to_path
from pallas_kernels import BlockTable

_MAX_POSITIONS = 2**26  # of all rows: 0.5 GB
_MAX_COLUMNS = 480  # columns of a heat map; tokens of longer texts share columns


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
    with canvas(check_picture(to_path(path)), 1.2 + 4.2 * len(head_groups), 4.9) as figure:
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
                f"{prefix}{share:.0%} of earlier keys are visible", fontsize=10, fontweight="normal"
            )
            axes.set_xlabel(_key_label(pattern))
        panels[0].set_ylabel("query")
        figure.suptitle(f"{name}, {length:,} tokens", x=0.02, ha="left", fontweight="bold")
        bar = figure.colorbar(image, ax=list(panels), shrink=0.8, pad=0.02)
        bar.set_label("distance at which it is seen")
        bar.outline.set_visible(False)
    return to_path(path)


def table_picture(tables: Mapping[str, BlockTable], path: str | Path) -> Path:
    """Draws the key blocks that each query block visits: one panel per static table.

    Only the first row and head of a table are drawn. Dark blocks are visible to all their queries,
    and light ones need an element test.

    Args:
      tables: Static tables by name.
      path: The PNG file; the SVG is written beside it.
    """
    if not tables or not all(table.static for table in tables.values()):
        raise InputError("tables: give at least one, known outside of a compiled program")
    with canvas(check_picture(to_path(path)), 0.6 + 3.2 * len(tables), 3.9) as figure:
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (name, table) in zip(panels, tables.items(), strict=True):
            listed, full = table.listed[0, 0], table.known_full[0, 0]
            index = table.index[0, 0]
            blocks = np.zeros((len(index), max(len(index), int(index.max()) + 1)))
            for row, columns in enumerate(index):
                blocks[row, columns[listed[row]]] = 0.35
                blocks[row, columns[full[row]]] = 0.8
            axes.imshow(blocks, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            axes.grid(False)
            axes.set_title(name, fontsize=10)
            visited = f"{(blocks > 0).sum():,} blocks of {table.q_block:,} x {table.k_block:,}"
            axes.set_xlabel(f"keys: {visited}, {(blocks > 0.5).sum():,} whole", fontsize=8.5)
        panels[0].set_ylabel("blocks of queries")
    return to_path(path)


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
    RoPE a pair turns. Right: the mean of cos(distance * frequency) over all pairs times the square
    of the method's scale, which is the product of equal unit queries and keys.

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
    _check_sizes(length=length, trained=trained, head_dim=head_dim)
    plain, _ = Default(theta=theta).frequencies(head_dim, length)
    distances = np.unique(np.round(np.geomspace(1, length, 240)).astype(int))
    with canvas(check_picture(to_path(path)), 13.6, 4.4) as figure:
        panels = figure.subplots(1, 3)
        for index, (name, rope) in enumerate(ropes.items()):
            rope = rope.resolve(theta=theta, length=trained)
            if rope.learned:
                raise InputError(f"ropes: {name} is learned, and no checkpoint is drawn here")
            freq, scale = rope.frequencies(head_dim, length)
            if not freq.size:
                raise InputError(f"ropes: {name} rotates nothing, so it has no wavelengths to draw")
            freq = np.asarray(freq, np.float64)
            style = {k: v for k, v in series_style(index).items() if k != "marker"}
            agreement = np.cos(distances[:, None] * freq).mean(1) * scale**2
            panels[0].plot(2 * np.pi / freq, label=name, **style)
            panels[1].plot(np.asarray(plain, np.float64) / freq, **style)
            panels[2].plot(distances, agreement, **style, linewidth=1.1)
        _rope_axes(panels, trained, length)
        figure.legend(loc="outside upper left", ncols=6, fontsize=9)
    return to_path(path)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        check_integer(name, size, 1, most=2**16 if name == "head_dim" else INT32_MAX)


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
        label = f"{text} {position:,}"
        panels[0].annotate(
            label,
            (0, position),
            xytext=(2, 3),
            textcoords="offset points",
            fontsize=8.5,
            color=GREY,
        )
        panels[2].axvline(position, **mark)


def trained_positions(
    positions: Positions, rope: Rope, *, length: int, rows: int, head_dim: int = 128, seed: int = 0
) -> np.ndarray:
    """Returns the positions of `rows` training rows, float64 [rows, length].

    A position is the angle in radians of the fastest pair, which plain RoPE rotates by 1 per token:
    interpolation by 8 gives multiples of 1/8.
    """
    counted = jnp.broadcast_to(jnp.arange(length), (rows, length))
    key = jax.random.key(seed)
    sampled, rotation = positions.sample(key, counted, rope=rope, head_dim=head_dim)
    inv_freq = np.asarray(rotation.inv_freq, np.float64)
    return np.asarray(sampled, np.float64) * inv_freq[..., :1]


def positions_picture(
    methods: Mapping[str, tuple[Positions, Rope]],
    path: str | Path,
    *,
    trained: int = 4096,
    length: int = 4096,
    theta: float = 10_000.0,
    rows: int = 400,
) -> Path:
    """Draws the positions that training rows visit (E2-LLM, arXiv 2401.06951, figures 2 and 3).

    Above: the positions of the first 40 rows. Below: how often each position is trained, as tokens
    of a row per unit.

    Args:
      methods: The sampling of training positions and the rope of the model, by name.
      path: The PNG file; the SVG is written beside it.
      trained: The length of the earlier training.
      length: The number of tokens of a row.
      theta: The base of the frequencies.
      rows: The number of rows that are sampled.
    """
    if not methods:
        raise InputError("methods: give at least one, such as {'E2-LLM': (E2Positions(), E2LLM())}")
    _check_sizes(rows=rows, length=length, trained=trained)
    if rows * length > _MAX_POSITIONS:
        raise InputError(
            f"rows={rows} x length={length} must be at most {_MAX_POSITIONS:,} positions; draw"
            " fewer rows, or shorter ones"
        )
    with canvas(check_picture(to_path(path)), 1.0 + 3.6 * len(methods), 5.2) as figure:
        panels = figure.subplots(2, len(methods), squeeze=False, sharex="col", sharey="row")
        for (above, below), (name, (positions, rope)) in zip(panels.T, methods.items()):
            rope = rope.resolve(theta=theta, length=trained)
            if rope.learned:
                raise InputError(f"methods: {name} is learned, and no checkpoint is drawn here")
            if isinstance(rope, NoRotation):
                raise InputError(f"methods: {name} rotates nothing, so it has no positions to draw")
            values = trained_positions(positions, rope, length=length, rows=rows)
            for row, line in enumerate(values[:40]):
                above.plot(line, np.full(len(line), row), ",", color=COLOURS[0])
            counts, edges = np.histogram(values, bins=128)
            below.stairs(counts / rows / np.diff(edges), edges, color=COLOURS[0], fill=True)
            above.set_title(name)
            below.set_xlabel("position")
            below.axvline(trained, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2)
        panels[0, 0].set_ylabel("training row")
        panels[1, 0].set_ylabel("tokens of a row in a unit")
    return to_path(path)


def attention_picture(
    lm: LanguageModel,
    prompt: str | Sequence[int],
    path: str | Path,
    *,
    head: int | None = None,
    **options,
) -> AnswerAttention:
    """Generates an answer and draws its attention; `options` are those of `answer_attention`.

    As in E2-LLM's figure 6 (arXiv 2401.06951), each row is a token of the answer, and each column a
    token of the context.
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
    colors = import_package("matplotlib.colors", to_path(path).name)
    norm = colors.PowerNorm(0.5, vmin=0, vmax=float(maps.max()) or 1.0)
    height = 0.5 + max(1.1, 0.17 * len(attention.tokens) + 0.6) * len(attention.layers)
    with canvas(check_picture(to_path(path)), 9.6, min(height, 40)) as figure:
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
    return to_path(path)


def _check_head(head: int | None, count: int) -> None:
    if head is not None and not 0 <= head < count:
        raise InputError(f"head={head} must be from 0 to {count - 1}")
