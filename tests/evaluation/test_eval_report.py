"""Tables of fixed cells, letter by letter, and figures that show something."""

import contextlib
import struct
import types
import zlib
from pathlib import Path

import draccus
import numpy as np
import pytest
from matplotlib.figure import Figure

from lcjax import files
from lcjax.attention import Sliding
from lcjax.evaluation import Passkey, Perplexity, cost_plots, plots, report
from lcjax.evaluation.report import page
from lcjax.evaluation.report.report import _is_exact
from lcjax.evaluation.report.tables import grid, interval_text, latex, markdown, to_csv
from lcjax.evaluation.task import Metric
from lcjax.models import LayerKind, preset

METRIC = Perplexity().metric


def cell(method, length, value, **more):
    fixed = {"task": "perplexity_slide_press", "protocol": "slide_press", "trained": 8192}
    return {**fixed, "method": method, "length": length, "value": value, **more}


CELLS = [
    cell("base", 4096, 6.224, windows=3, peak_bytes=10, tokens_per_second=2.5),
    cell("base", 16384, 1234.5, windows=1, peak_bytes=12, tokens_per_second=2.0),
    cell("yarn", 4096, 6.2242, windows=3, peak_bytes=10, tokens_per_second=2.5),
    cell("yarn", 16384, 5.5, windows=1, peak_bytes=None, tokens_per_second=2.0),
    cell("a, b", 4096, float("nan"), windows=3, peak_bytes=10, tokens_per_second=2.5),
]


def test_markdown_bolds_the_best_shows_large_perplexities_and_leaves_the_missing_empty():
    assert markdown(grid(CELLS, "value", METRIC)) == (
        "| method |    4,096 |     16,384 |\n"
        "| ------ | -------: | ---------: |\n"
        "| base   | **6.22** | _1,234.50_ |\n"
        "| yarn   | **6.22** |   **5.50** |\n"
        "| a, b   |      nan |            |\n"
    )


def test_csv_keeps_every_number_in_full():
    assert to_csv(CELLS) == (
        "task,protocol,method,length,value,trained,windows,tokens_per_second,peak_bytes\n"
        "perplexity_slide_press,slide_press,base,4096,6.224,8192,3,2.5,10\n"
        "perplexity_slide_press,slide_press,base,16384,1234.5,8192,1,2.0,12\n"
        "perplexity_slide_press,slide_press,yarn,4096,6.2242,8192,3,2.5,10\n"
        "perplexity_slide_press,slide_press,yarn,16384,5.5,8192,1,2.0,\n"
        'perplexity_slide_press,slide_press,"a, b",4096,nan,8192,3,2.5,10\n'
    )


def test_accuracy_is_best_when_high_and_a_single_row_is_not_bold():
    metric = Metric("accuracy", "accuracy", False, 2)
    rows = grid([cell("a", 8, 0.25), cell("b", 8, 1.0)], "value", metric)
    assert [row[1] for row in rows] == ["8", "0.25", "**1.00**"]
    assert grid([cell("a", 8, 0.25)], "value", metric)[1][1] == "0.25"


def pixels(path) -> np.ndarray:
    """RGBA values of a PNG, uint8 [height, width, 4], through matplotlib's reader."""
    from matplotlib.image import imread

    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    (size,) = struct.unpack(">I", data[8:12])
    assert zlib.crc32(data[12 : 16 + size]) == struct.unpack(">I", data[16 + size : 20 + size])[0]
    return (imread(path) * 255).astype(np.uint8)


def has_colour(image, colour, at_least=50):
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (np.abs(image[..., :3].astype(int) - rgb).max(-1) < 12).sum() >= at_least


def test_perplexity_over_lengths_shows_a_line_per_method(tmp_path):
    finite = [entry for entry in CELLS if entry["value"] == entry["value"]]
    image = pixels(plots.over_lengths(finite, METRIC, tmp_path / "a.png"))
    assert min(image.shape[:2]) > 400
    assert has_colour(image, "#0072B2") and has_colour(image, "#D55E00")
    assert not has_colour(image, "#009E73")


def test_perplexities_of_thousands_lie_inside_the_figure_and_in_the_scatter(tmp_path, undrawn):
    axes = Figure().add_subplot()
    axes.plot([0, 1], [5.0, 30_000.0])
    plots.value_axis(axes, [5.0, 30_000.0], METRIC)
    low, high = axes.get_ylim()
    assert low < 5 and high > 30_000
    assert interval_text({"ci_low": 900.0, "ci_high": 2100.0}, METRIC) == "900.00 – 2,100.00"
    values = {"a": 5.0, "b": 6.0, "c": 30_000.0}
    cells = {
        Perplexity(): [cell(name, 8, value) for name, value in values.items()],
        Passkey(): [cell(name, 8, 0.5) for name in values],
    }
    assert plots.perplexity_against_accuracy(cells, tmp_path)


def test_scores_beyond_one_lie_inside_the_figure_and_the_best_answer_is_not_wrong():
    metric, axes = Metric("bleu", "BLEU", False, 1), Figure().add_subplot()
    plots.value_axis(axes, [12.0, 41.0], metric)
    low, high = axes.get_ylim()
    assert low < 12 and high > 41
    task = types.SimpleNamespace(
        label="bleu",
        metric=metric,
        example=lambda record: record["correct"],
        references=lambda record: [],
    )
    fixed = {"method": "a", "length": 8, "answer": "x"}
    records = [{**fixed, "window": i, "correct": v} for i, v in enumerate((3.0, 90.0))]
    (group,) = page.examples_of(task, records).groups
    assert [row["value"] for row in group["rows"]] == [3.0]


def test_figures_survive_values_that_are_missing_or_not_numbers(tmp_path):
    broken = [cell("a", 8, float("nan")), cell("a", 16, float("inf")), cell("b", 8, 3.0)]
    assert pixels(plots.over_lengths(broken, METRIC, tmp_path / "a.png")).std() > 5
    only = [cell("a", 8, float("nan"))]
    assert pixels(plots.over_lengths(only, METRIC, tmp_path / "b.png")).std() > 1


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("log", [False, True])
def test_loss_by_position_draws_curve_and_band(tmp_path, log):
    position = np.arange(1, 4096, 64)
    curve = {"position": position, "nll": 3 - 0.1 * np.log(position), "log": log}
    curve |= {"standard_error": np.full(len(position), 0.1), "trained": 2048}
    curves = [{**curve, "method": "yarn", "length": 4096}]
    image = pixels(plots.over_positions(curves, tmp_path / "a.png"))
    assert has_colour(image, "#0072B2")
    assert has_colour(image, "#D0E3F0", 500)  # the band: 18 % of the line's colour on white


def test_heat_maps_show_right_and_wrong_on_one_scale_with_the_trained_length(tmp_path):
    records = [
        {"method": method, "length": length, "depth": depth, "trained": 8192}
        | {"correct": method == "yarn" or length <= 8192}
        for method in ("base", "yarn")
        for length in (4096, 8192, 16384)
        for depth in (0.0, 0.5, 1.0)
    ]
    image = pixels(plots.heat_maps(records, "Passkey", tmp_path / "a.png"))
    assert has_colour(image, "#FDE737", 3000) and has_colour(image, "#00224D", 1000)
    assert has_colour(image, "#D55E00", 100)
    # Bad cells lie beyond the trained length: the dark ones are in one panel, on its right.
    dark = (np.abs(image[..., :3].astype(int) - [0, 34, 77]).max(-1) < 12).nonzero()[1]
    assert np.percentile(dark, 5) < image.shape[1] / 2


@pytest.mark.slow_except("1", "3")  # one panel and a row of them
@pytest.mark.parametrize("methods", [1, 2, 3])
def test_depth_zero_is_on_top_whatever_the_number_of_panels(tmp_path, methods):
    records = [
        {"method": f"m{m}", "length": n, "depth": d, "trained": 1, "correct": d == 0.0}
        for m in range(methods)
        for n in (8, 16)
        for d in (0.0, 1.0)
    ]
    image = pixels(plots.heat_maps(records, "Passkey", tmp_path / "a.png"))[..., :3].astype(int)
    image = image[:, : int(0.8 * image.shape[1])]  # without the colour bar
    rows = {}
    for name, colour in (("right", [253, 231, 55]), ("wrong", [0, 34, 77])):
        rows[name] = (np.abs(image - colour).max(-1) < 12).nonzero()[0]
    assert min(map(len, rows.values())) > 1000
    assert np.percentile(rows["right"], 95) < np.percentile(rows["wrong"], 5)


def test_rows_of_depths_that_round_to_one_percent_show_decimals(tmp_path):
    fields = {"method": "m", "length": 8, "trained": 1, "correct": True}
    for depths, label in (((0.0, 0.25, 1.0), ">25%<"), ((0.00896, 0.01185, 1.0), ">0.90%<")):
        path = plots.heat_maps([fields | {"depth": d} for d in depths], "", tmp_path / "a.png")
        assert label in path.with_suffix(".svg").read_text()


def test_latex_has_rules_a_bold_best_an_underlined_second_and_escaped_names():
    cells = [*CELLS, cell("a_b & 50%", 4096, 7.0), cell("yarn", 8192, 3.0)]
    assert latex(cells, "value", METRIC) == (
        "% perplexity (slide_press), lower is better; \\usepackage{booktabs}\n"
        "\\begin{tabular}{lrrr}\n"
        "\\toprule\n"
        "method       & 4,096            & 8,192         & 16,384 \\\\\n"
        "\\midrule\n"
        "base         & \\textbf{6.22}    &               & \\underline{1,234.50} \\\\\n"
        "yarn         & \\textbf{6.22}    & \\textbf{3.00} & \\textbf{5.50} \\\\\n"
        "a, b         & nan              &               & \\\\\n"
        "a\\_b \\& 50\\% & \\underline{7.00} &               & \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


def test_the_second_of_three_is_underlined_and_equal_numbers_share_a_place():
    metric = Metric("accuracy", "accuracy", False, 2)
    values = {"a": 0.5, "b": 0.9, "c": 0.501, "d": 0.1}
    rows = grid([cell(name, 8, value) for name, value in values.items()], "value", metric)
    assert [row[1] for row in rows] == ["8", "_0.50_", "**0.90**", "_0.50_", "0.10"]


def test_costs_are_bars_and_a_peak_that_is_only_a_bound_is_hatched(tmp_path):
    rows = [
        {"method": method, "length": length, "speed": 100.0, "peak": 1e9, "bound": method == "b"}
        for method in "ab"
        for length in (8, 16)
    ]
    image = pixels(cost_plots.cost_bars(rows, tmp_path / "a.png"))
    blue, red = (np.abs(image[..., :3].astype(int) - colour).max(-1) < 12
                 for colour in ([0, 114, 178], [213, 94, 0]))  # fmt: skip
    half = image.shape[1] // 2
    assert red[:, :half].sum() > 0.8 * blue[:, :half].sum()
    assert 0 < red[:, half:].sum() < 0.5 * blue[:, half:].sum()


def costly(method, value, cache_bytes, seconds=2.0, length=4096, **more):
    measured = {"cache_bytes": cache_bytes, "seconds": seconds, "windows": 4}
    return cell(method, length, value, **measured, **more)


def test_no_other_method_beats_those_on_the_line_at_their_cost():
    points = [(3, 0.9), (1, 0.2), (2, 0.2), (1, 0.1), (2, 0.5), (3, 0.9), (4, 0.8)]
    assert cost_plots.best_at_cost(points) == [1, 4, 0]
    assert cost_plots.best_at_cost(points, lower_is_better=True) == [3]


def test_scores_are_drawn_by_cost_only_where_methods_differ_in_it(tmp_path, undrawn):
    metric, path = Metric("accuracy", "accuracy", False, 2), tmp_path / "a_by_cost.png"
    for drawn, second in (
        (False, costly("b", 0.5, 1e6)),
        (False, costly("b", 0.5, 1.01e6, 2.5)),
        (True, costly("b", 0.5, 2e6)),
        (True, costly("b", 0.5, 1e6, 4.0)),
        (False, costly("b", 0.5, None)),
        (True, costly("b", 0.5, None, 4.0)),
        (False, costly("b", float("nan"), 2e6)),
        (True, costly("b", 0.5, 2e6, 0.0)),
    ):
        cells = [costly("a", 1.0, 1e6), second]
        assert cost_plots.over_costs(cells, metric, path) == [path] * drawn, second
    # Seconds of cells that took less than one are noise.
    quick = [costly("a", 1.0, None, 0.2), costly("b", 0.5, None, 0.4)]
    assert cost_plots.over_costs(quick, metric, path) == []


def test_names_of_twenty_methods_cover_neither_each_other_nor_a_mark(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    shares = (0.25, 0.5, 0.75, 0.9)
    cells = [
        costly(f"{name}-{share}", score * (1 - share**4), 1e9 * (1 - share) * length / 4096,
               9 - 3 * share + place, length, ci_low=0.1, ci_high=0.95)
        for place, (name, score) in enumerate(
            {"snapkv": 0.9, "expected-attention": 0.9, "tova": 0.8, "streaming": 0.4,
             "random": 0.0}.items()
        )
        for share in shares
        for length in (2048, 4096)
    ]  # fmt: skip
    metric = Metric("accuracy", "accuracy", False, 2)
    cost_plots.over_costs(cells, metric, tmp_path / "a.png")
    for axes in figures[0].axes:
        names = [text for text in axes.texts if text.get_text()]
        assert sorted(t.get_text() for t in names) == sorted({c["method"] for c in cells})
        boxes = [text.get_window_extent() for text in names]
        marks = [line for line in axes.lines if line.get_markersize() == 7]
        places = [axes.transData.transform(line.get_xydata()[0]) for line in marks]
        assert len(marks) == 20
        for index, box in enumerate(boxes):
            assert axes.get_window_extent().containsx(box.x0) and axes.bbox.containsx(box.x1)
            assert not any(box.overlaps(other) for other in boxes[:index]), names[index]
            assert not any(box.contains(*place) for place in places), names[index]
        for index, place in enumerate(places):
            assert all(np.abs(place - other).max() > 9.9 for other in places[:index])


def test_marks_that_would_overlap_stand_side_by_side_in_order():
    centres = np.array([[50.0, 7], [0, 0], [4, 3], [0, 0], [0, 80], [50, 7]])
    places = cost_plots._side_by_side(centres)
    np.testing.assert_allclose(places[:, 0], [45, -8, 12, 2, 0, 55])
    np.testing.assert_array_equal(places[:, 1], centres[:, 1])


def test_the_scatter_plots_perplexity_against_accuracy(tmp_path):
    points = {name: (8.0 - i, 0.2 * i) for i, name in enumerate("abcd")}
    panels = {"accuracy": points, "needle": dict(list(points.items())[:3])}
    path = tmp_path / "a.png"
    plots._scatter_panels(panels, "ppl", path, methods="abcd", approximate="d")
    assert has_colour(pixels(path), "#0072B2") and has_colour(pixels(path), "#CC79A7")
    filled = plots._scatter_panels(panels, "ppl", tmp_path / "b.png", methods="abcd")
    pink = [
        (np.abs(pixels(p)[..., :3].astype(int) - [204, 121, 167]).max(-1) < 12).sum()
        for p in (path, filled)
    ]
    assert 50 < pink[0] < 0.9 * pink[1], "the mark of d is hollow"
    assert "approximate" in path.with_suffix(".svg").read_text()
    assert "n = 3, " in path.with_suffix(".svg").read_text()
    text = path.with_suffix(".svg").read_text()
    assert "n = 4, Pearson r = -1.00 [-1.00, -1.00]" in text and "Spearman ρ = -1.00" in text


def test_a_run_has_a_scatter_where_three_methods_have_both_numbers(tmp_path, undrawn):
    passkey = Passkey()
    cells = {
        Perplexity(): [cell(name, 8, 3.0 + i) for i, name in enumerate("abc")],
        passkey: [cell(name, 8, 0.1 * i) for i, name in enumerate("abc")],
    }
    assert [file.name for file in plots.perplexity_against_accuracy(cells, tmp_path)] == [
        "perplexity_accuracy.png"
    ]
    broken = {task: own[: 2 + (task is passkey)] for task, own in cells.items()}
    assert plots.perplexity_against_accuracy(broken, tmp_path) == []
    assert plots.perplexity_against_accuracy({passkey: cells[passkey]}, tmp_path) == []


def test_a_point_of_the_scatter_has_the_mean_of_a_needles_lengths_and_the_longest_of_others():
    rows = [cell("a", 8, 0.5), cell("a", 16, 0.25)]
    assert (Passkey().overall(rows), Perplexity().overall(rows)) == (0.375, 0.25)


def test_attention_is_exact_where_all_layers_and_no_memory_see_all():
    tiny = preset("tiny")
    kinds = (LayerKind(pattern=Sliding(8)), LayerKind())
    for model, exact in (
        (tiny, True),
        (tiny.replace(pattern=Sliding(8)), False),
        (tiny.replace(layers=kinds), False),
    ):
        assert _is_exact(draccus.encode(model)) == exact
    assert not _is_exact({**draccus.encode(tiny), "memory": {"type": "cepe"}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("many_shot_by_shots", "demonstrations"),
        ("ruler_by_cost", "KV cache"),
        ("open_qa_by_passages", "passages"),
        ("multi_document_qa_by_gold_position", "document with the answer"),
        ("perplexity_by_position", "loss of the tokens"),
        ("a_by_depth", "scale"),
        ("a_by_task", "scale"),
    ],
)
def test_a_figure_has_a_description(tmp_path, name, words):
    (tmp_path / f"{name}.svg").write_text("<svg></svg>")
    (figure,) = page.figures_of([tmp_path / f"{name}.png"], "a")
    assert words in figure["caption"]


def test_figures_over_lengths_have_a_description(tmp_path):
    cells = [cell("a", 4096, 5.0), cell("a", 8192, 4.0), cell("a", 16384, 3.0)]
    said = []
    for index, own in enumerate((cells, [{**c, "trained": 10} for c in cells], cells[:1])):
        path = plots.over_lengths(own, METRIC, tmp_path / f"{index}.png")
        said += [figure["caption"] for figure in page.figures_of([path], "a")]
    assert said == [
        "One line a method; the dashed line stands at the trained length.",
        "One line a method.",
        "A dot a method, with its 95 % interval where one is known.",
    ]


def test_at_a_single_length_every_method_has_a_row_with_its_interval(tmp_path):
    ends = {"ci_low": 4.0, "ci_high": 9.0}
    cells = [cell("a", 8, 6.0, **ends), cell("b", 8, 6.0, **ends), cell("c", 8, 2000.0)]
    path = plots.over_lengths(cells, METRIC, tmp_path / "a.png")
    image = pixels(path)[..., :3].astype(int)
    places = [
        (np.abs(image - colour).max(-1) < 12).nonzero() for colour in ([0, 114, 178], [213, 94, 0])
    ]
    (above, first), (below, second) = places
    assert above.max() < below.min()  # equal values do not hide each other
    assert np.ptp(first) == pytest.approx(np.ptp(second), abs=3)
    assert np.ptp(first) > 100
    text = path.with_suffix(".svg").read_text()
    assert "at 8 tokens" in text and all(f">{name}</text>" in text for name in "abc")


def test_figures_of_all_sizes_are_drawn_to_one_scale(tmp_path):
    (tmp_path / "a.svg").write_text(
        '<svg width="302.4pt" height="9pt" viewBox="0 0 302.4 9"></svg>'
    )
    (figure,) = page.figures_of([tmp_path / "a.png"], "a")
    assert 'style="--wide: 26.0rem"' in figure["svg"] and "pt" not in figure["svg"]


@pytest.mark.parametrize("name", ["summary.json", "tables/training.md"])
def test_a_report_that_is_stopped_leaves_no_file_half_written(tmp_path, monkeypatch, name):
    atomic_file = files.atomic_file

    @contextlib.contextmanager
    def stop(path, *args, **options):
        with atomic_file(path, *args, **options) as file:
            if path.name == Path(name).name:
                file.write("{")
                raise KeyboardInterrupt
            yield file

    (tmp_path / "tables").mkdir()
    (tmp_path / name).write_text("of before")
    monkeypatch.setattr(files, "atomic_file", stop)
    with pytest.raises(KeyboardInterrupt):
        report.write(tmp_path, {}, {}, order=(), published=(), notes="trainings", environment={})
    assert (tmp_path / name).read_text() == "of before"


def test_columns_of_examples_vary_and_are_shown_nowhere_else():
    cell = ("method", "length", "trained", "tokenizer", "digest")
    protocol = ("protocol", "wording", "stride", "bos", "template", "budget", "max_new_tokens")
    costs = ("seconds", "compile_seconds", "read", "peak_bytes", "peak_bytes_at_most")
    costs += ("cache_bytes",)
    sizes = ("size", "bytes", "first", "scored", "weight", "prompt_tokens")
    answers = ("prompt", "answer", "references", "key", "correct", "score", "finish")
    internals = ("ids", "nan", "nll", "decoder", "decoder_passages")
    # One at a time: five columns at most are shown, and would hide that others are not.
    for field in (*cell, *protocol, *costs, *sizes, *answers, *internals):
        records = [{field: value, "depth": value, "task": "same"} for value in (2, 3)]
        assert page._columns(records) == ["depth"], field
