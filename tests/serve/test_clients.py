"""Programs of others against a server: lm-evaluation-harness and OpenAI's own client."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

sys.path.append(str(Path(__file__).parents[1] / "evaluation" / "harness"))
from harness_support import language_model, write_tasks
from serve_support import serving

from lcjax.checkpoints import save_hf
from lcjax.generation.sampling import Sampling

LENGTH = 96


@pytest.fixture(scope="module")
def lm():
    return language_model()


@pytest.fixture(scope="module")
def client(lm):
    # The harness keeps a place for BOS and one for the token that it asks for.
    with serving(lm, length=LENGTH + 2, name="tiny-model") as client:
        yield client


# lm-evaluation-harness


NAMES = ["tiny_choice", "tiny_choice_bare", "tiny_last_word", "tiny_texts", "tiny_writing"]


def evaluated(model, tasks, names=NAMES, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks, include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options
    )


def answers(results, name):
    return [sample["resps"] for sample in results["samples"][name]]


@pytest.fixture(scope="module")
def harness(lm, tmp_path_factory):
    """The tasks, the folder of the tokenizer, and what the adapter gives in this process."""
    pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra eval")
    for package in ("transformers", "aiohttp", "tenacity", "requests"):
        pytest.importorskip(package, reason="needs lm-eval[api]")
    from lcjax.evaluation.lm_eval import HarnessModel

    tasks = write_tasks(tmp_path_factory.mktemp("tasks"))
    folder = str(tmp_path_factory.mktemp("model"))
    save_hf(folder, lm.params, lm.config.replace(scan_layers=False), lm.tokenizer)
    adapter = HarnessModel(lm, max_length=LENGTH, batch_size=3)
    return tasks, folder, evaluated(adapter, tasks)


@pytest.mark.slow  # importing and indexing the harness alone takes ten seconds
@pytest.mark.parametrize(
    "options", ["batch_size=3", "num_concurrent=4", "tokenized_requests=False"]
)
def test_local_completions_scores_as_the_adapter_in_process(client, harness, options):
    tasks, folder, expected = harness
    name, _, value = options.partition("=")
    arguments = {
        "model": "tiny-model", "base_url": f"{client.url}/completions", "tokenizer": folder,
        "tokenizer_backend": "huggingface", "add_bos_token": True, "max_length": LENGTH + 2,
        name: value == "True" if value in ("True", "False") else int(value),
    }  # fmt: skip
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    # As text a window from the middle of a document would get BOS.
    names = [task for task in NAMES if name != "tokenized_requests" or task != "tiny_texts"]
    results = evaluated(LocalCompletionsAPI(**arguments), tasks, names)
    for task in names:
        expected_answers, actual_answers = answers(expected, task), answers(results, task)
        assert len(expected_answers) == len(actual_answers) > 0
        if task == "tiny_writing":
            assert actual_answers == expected_answers
        elif task == "tiny_texts":
            np.testing.assert_allclose(actual_answers, expected_answers, rtol=1e-5)
        else:
            for one, other in zip(expected_answers, actual_answers, strict=True):
                for (value, greedy), (api_value, api_greedy) in zip(one[0], other[0], strict=True):
                    assert float(api_value) == pytest.approx(float(value), abs=1e-4)
                    assert api_greedy == greedy
        for key, value in expected["results"][task].items():
            if "," in key and isinstance(value, float):
                assert results["results"][task][key] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_local_chat_completions_answers_as_the_adapter_in_process(client, lm, harness):
    from lm_eval.models.openai_completions import LocalChatCompletion

    from lcjax.evaluation.lm_eval import HarnessModel

    tasks, *_ = harness
    adapter = HarnessModel(lm, max_length=LENGTH, batch_size=3)
    url = f"{client.url}/chat/completions"
    api = LocalChatCompletion(model="tiny-model", base_url=url, max_length=LENGTH + 2)
    options = {"names": ["tiny_writing"], "apply_chat_template": True}
    expected_answers, actual_answers = (
        evaluated(model, tasks, **options) for model in (adapter, api)
    )
    assert answers(actual_answers, "tiny_writing") == answers(expected_answers, "tiny_writing")


# OpenAI's client


@pytest.fixture(scope="module")
def openai_client(client):
    openai = pytest.importorskip("openai", reason="needs the package openai")
    with openai.OpenAI(base_url=client.url, api_key="none", max_retries=0) as opened:
        yield opened


def test_the_openai_client_streams_completions(openai_client, lm):
    (model,) = openai_client.models.list().data
    options = {"model": model.id, "prompt": "the red dog", "max_tokens": 9, "temperature": 0}
    whole = openai_client.completions.create(**options, logprobs=2, echo=True)
    expected = lm.generate(["the red dog"], Sampling(max_new_tokens=9))[0]
    assert whole.choices[0].text == "the red dog" + expected
    scores, ids = whole.choices[0].logprobs, [*lm.encode("the red dog"), *expected.ids]
    np.testing.assert_allclose(scores.token_logprobs, -lm.nll([ids])[0, 1:], atol=2e-5)
    assert all(max(top.values()) == value for top, value in
               zip(scores.top_logprobs[-9:], scores.token_logprobs[-9:], strict=True))  # fmt: skip
    stream = openai_client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == len(expected.ids)


def test_the_openai_client_streams_chats(openai_client, lm):
    messages = [{"role": "user", "content": "a blue cat"}]
    options = {"model": "tiny-model", "messages": messages, "temperature": 0}
    options |= {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}
    whole = openai_client.chat.completions.create(**options)
    expected = lm.chat("a blue cat", Sampling(max_new_tokens=9))
    assert whole.choices[0].message.content == expected
    entries = whole.choices[0].logprobs.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    chunks = list(openai_client.chat.completions.create(**options, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == expected
    streamed = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert [x.logprob for x in streamed] == pytest.approx([x.logprob for x in entries])
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_openai_client_raises_its_own_errors(openai_client):
    import openai

    create = openai_client.completions.create
    with pytest.raises(openai.NotFoundError, match="this server has tiny-model"):
        create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="together 5002"):
        create(model="tiny-model", prompt="a", max_tokens=5000)
    context = openai_client.post("/contexts", body={"text": "the red house"}, cast_to=object)
    answer = create(model="tiny-model", prompt=" is", extra_body={"context": context["id"]})
    assert answer.usage.prompt_tokens > context["tokens"]
