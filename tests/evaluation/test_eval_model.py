"""The runner with a real decoder of random weights: what it reports is what the model says."""

import dataclasses
import json
import re
import warnings

import numpy as np
import pytest
from evaluation_support import only_the_run, texts

from lcjax.attention import Landmark, Sliding
from lcjax.attention.policies import DuoAttention, Knorm, SnapKV
from lcjax.checkpoints.build import ModelSection
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import (
    EvalConfig,
    Method,
    Niah,
    Passkey,
    Perplexity,
    ReplugSplit,
    RunSection,
    run,
)
from lcjax.evaluation.eval_config import apply_method
from lcjax.evaluation.run import check
from lcjax.generation.language_model import LanguageModel
from lcjax.parallel.sharding import Mesh
from lcjax.rope import DynamicNTK, Linear


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    (folder / "text").mkdir()
    for name, text in texts((200, 120, 150)):
        (folder / "text" / f"{name}.txt").write_text(text)
    config = EvalConfig(
        model=ModelSection(preset="tiny"),
        methods=(Method("base"), Method("pi", rope=Linear(factor=4.0))),
        tasks=(Perplexity(protocol="prefix_yarn"),),
        lengths=(128,),
        stride=16,
        data=TextConfig(path=str(folder / "text")),
        mesh=Mesh(data=2, fsdp=2, tensor=2),
        batch_size=3,  # no multiple of what the rows are spread over
        run=RunSection(str(folder / "out")),
    )
    with only_the_run():
        return config, run(config)


def test_the_summary_names_the_model_and_scale_of_each_method(found):
    _, report = found
    models = json.loads(report.files[0].read_text())["models"]
    assert models["base"]["rope"]["type"] == "default"
    rope = models["pi"]["rope"]
    assert (rope["type"], rope["factor"]) == ("linear", 4.0)
    assert rope["theta"] == models["base"]["rope"]["theta"]
    assert models["pi"]["num_layers"] == 2


@pytest.fixture(scope="module")
def model(found):
    return LanguageModel.load(found[0].model)


@pytest.mark.parametrize("name", ["base", "pi"])
def test_prefix_perplexity_on_a_mesh_equals_the_loss_of_the_model_on_one_device(found, model, name):
    config, report = found
    for length in config.lengths:
        means = []
        for _, text in texts((200, 120, 150)):
            ids = [model.tokenizer.bos_id, *model.tokenizer.encode(text)]
            if len(ids) < 128:
                continue
            rope = None if name == "base" else Linear(factor=4.0)
            other = model.with_method(rope=rope, length=length)
            means.append(other.nll(np.array([ids[:length]]))[0, 1:].mean(dtype=np.float64))
        assert len(means) == 2
        (value,) = [
            cell["value"]
            for cell in report.cells
            if (cell["method"], cell["length"]) == (name, length)
        ]
        assert value == pytest.approx(np.exp(np.mean(means)), rel=1e-5)


def test_methods_differ_and_the_trained_length_is_the_checkpoints(found):
    _, report = found
    cells = {(cell["method"], cell["length"]): cell for cell in report.cells}
    assert cells["base", 128]["value"] != cells["pi", 128]["value"]
    assert {cell["trained"] for cell in report.cells} == {128}
    assert all(cell["tokens_per_second"] > 0 for cell in report.cells)


def test_a_checkpoint_that_is_not_there_is_named_before_any_model_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **__: pytest.fail("a model was read"))
    methods = (Method("base"), Method("trained", path=str(tmp_path / "absent")))
    with pytest.raises(InputError, match=r"^methods\.1\.path=.*absent: no such file or folder"):
        run(EvalConfig(model=ModelSection(preset="tiny"), methods=methods))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"cache": DuoAttention("/absent.tsv")}, "model.cache.file=/absent.tsv .*No such file"),
        ({"cache": Knorm(ratio=0.5), "pattern": Landmark()}, "type=knorm is not defined.*landmark"),
        ({"cache": Knorm(ratio=0.5), "pattern": Sliding(8)}, "all layers of this model have win"),
        ({"cache": Knorm(ratio=0.5), "question": "window"}, "knorm does not choose by the last"),
        ({"question": "unseen"}, "question=unseen or window needs a cache policy"),
    ],
)
def test_a_method_that_does_not_fit_its_model_is_named_before_any_model_is_read(
    tmp_path, monkeypatch, method, words
):
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **__: pytest.fail("a model was read"))
    config = EvalConfig(
        model=ModelSection(preset="tiny"),
        methods=(Method("base"), Method("odd", **method)),
        tasks=(Passkey(),),
        lengths=(512,),
        run=RunSection(str(tmp_path / "out")),
    )
    with pytest.raises(InputError, match=f"^methods: odd: .*{words}") as error:
        run(config)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


UNSEEN = ("unseen", "window")


def test_a_question_of_a_method_without_effect_is_named_before_any_model_is_read(monkeypatch):
    monkeypatch.setattr(LanguageModel, "load", lambda *_, **__: pytest.fail("a model was read"))
    methods = (Method("full"), *(Method(x, cache=SnapKV(ratio=0.5), question=x) for x in UNSEEN))
    config = EvalConfig(model=ModelSection(preset="tiny"), methods=methods)
    words = "question of unseen, window has no effect on perplexity_slide_press"
    with pytest.raises(InputError, match=f"^methods: {words}.*; leave question out"):
        run(config)
    with pytest.warns(UserWarning, match=f"^methods: {words}, whose texts have no question$"):
        check(dataclasses.replace(config, tasks=(*config.tasks, Passkey()), lengths=(512,)))
    with warnings.catch_warnings(action="error"):
        check(dataclasses.replace(config, tasks=(Passkey(), Niah()), lengths=(512,)))


def test_a_mesh_that_does_not_fit_the_devices_raises_input_error_before_anything_is_written(
    tmp_path,
):
    config = EvalConfig(model=ModelSection(preset="tiny"), run=RunSection(str(tmp_path / "out")))
    with pytest.raises(InputError, match=r"mesh\.data=3 must divide"):
        run(dataclasses.replace(config, mesh=Mesh(data=3)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("replug", [None, ReplugSplit(chunk=16, decoder=1008)])
def test_windows_are_rotated_for_the_length_of_the_cell_and_prompts_for_their_own(model, replug):
    method = Method("ntk", rope=DynamicNTK(factor=2.0, original_length=128), replug=replug)

    def slowest(length):  # theta times (factor * length / original - (factor - 1)) ** (d / (d - 2))
        size, theta = model.config.head_dim, model.config.rope.theta
        growth = max(2 * length / 128 - 1, 1) ** (size / (size - 2))
        return (theta * growth) ** ((2 - size) / size)

    for prompts, lengths in ((False, (1024, 1024)), (True, (100, 640))):
        subject = apply_method(model, method, 1024, prompts=prompts)
        lm = subject if replug is None else subject.lm
        rows = lm.rotations([100, 640]).inv_freq[..., -1]  # one for both rows, or one for each
        wanted = [slowest(length) for length in lengths]
        np.testing.assert_allclose(np.broadcast_to(rows, 2), wanted, rtol=1e-5)


@pytest.mark.slow
def test_passkey_runs_through_generation_in_batches(found, tmp_path, capsys):
    config, _ = found
    own = EvalConfig(
        model=config.model,
        tasks=(Passkey(depths=3, max_new_tokens=2),),
        lengths=(448,),
        batch_size=2,
        run=RunSection(str(tmp_path / "out")),
    )
    (cell,) = run(own).cells
    assert cell["windows"] == 3 and cell["value"] == 0.0
    # It says before the first batch what it needs, and that devices would be idle.
    said = capsys.readouterr().err
    parts = r"\(weights 0\.0 \+ activations 0\.\d \+ cache 0\.0 \+ process 0\.\d"
    assert re.search(rf"tiny: up to about 0\.\d GB {parts}", said)
    assert (
        "batch_size=2 of 448 tokens; 6 more rows are filler: batch_size=8 takes no longer" in said
    )


@pytest.mark.slow
def test_what_prompts_begin_with_is_read_once_and_records_do_not_show_it(
    found, model, tmp_path, monkeypatch
):
    # Of text without a full stop, needles stand at the very beginning or at the very end.
    task = Niah(depths=2, trials=3, max_new_tokens=2)
    config = EvalConfig(tasks=(task,), lengths=(1800,), batch_size=2, data=found[0].data)

    def records(name):
        run(dataclasses.replace(config, run=RunSection(str(tmp_path / name))), load=lambda _: model)
        lines = (tmp_path / name / "records" / "niah.jsonl").read_text().splitlines()
        return sorted(map(json.loads, lines), key=lambda record: record["window"])

    shared = records("shared")
    monkeypatch.setattr(LanguageModel, "shares_prefixes", False)
    plain = records("plain")
    sizes = [record["size"] for record in plain]
    assert [record["read"] for record in plain] == sizes and len(sizes) == 6
    # Two go on from the text of a third; all of them read the end of what they share again.
    assert sum(record["read"] for record in shared) < sum(sizes) - 1024
    for one, other in zip(shared, plain, strict=True):
        for name in ("window", "digest", "answer", "correct", "scores", "prompt_tokens"):
            assert one[name] == other[name]
