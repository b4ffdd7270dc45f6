"""Completions over HTTP are what the model gives in process: scores, texts, streams."""

import concurrent.futures
import math

import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from serve_support import serving

from lcjax.generation.sampling import Sampling
from lcjax.generation.session import pad_right

PROMPTS = [ids(1, 40), ids(2, 7), ids(3, 21)]


@pytest.fixture(scope="module")
def client():
    with serving(sharp_lm()) as client:
        yield client


def nll(lm, row, first=1):
    return lm.nll([row], first=first)[0, first:]


@pytest.mark.slow_except("1", "3")
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_gives_the_scores_of_the_model(client, max_tokens):
    lm = client.lm
    answer = client.complete(PROMPTS, echo=True, logprobs=1, max_tokens=max_tokens)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    sampling = Sampling(max_new_tokens=max(max_tokens, 1))
    texts = [lm.generate([prompt], sampling)[0] for prompt in PROMPTS]
    rows = [[*prompt, *text.ids[:max_tokens]] for prompt, text in zip(PROMPTS, texts)]
    sizes = np.array([len(row) for row in rows])
    tokens = pad_right(rows)
    expected, logits = lm.nll(tokens, lengths=sizes), lm.logits(tokens, lengths=sizes)
    for index, choice in enumerate(answer["choices"]):
        prompt, text, row, size = PROMPTS[index], texts[index], rows[index], sizes[index]
        assert choice["index"] == index
        assert choice["text"] == lm.tokenizer.decode(prompt) + (text if max_tokens else "")
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        assert {len(scores[name]) for name in scores} == {size}
        np.testing.assert_allclose(
            scores["token_logprobs"][1:], -expected[index, 1:size], atol=2e-5
        )
        assert [scores["text_offset"][0], len(scores["text_offset"])] == [0, size]
        # Harnesses compare numbers, or strings, to see whether a token is the most probable one.
        is_greedy = logits[index, : size - 1].argmax(-1) == row[1:]
        pairs = zip(scores["tokens"][1:], scores["token_logprobs"][1:], scores["top_logprobs"][1:])
        for greedy, (token, value, top) in zip(is_greedy, pairs, strict=True):
            assert greedy == (value == max(top.values())) == (token in top)


def test_scores_alone_equal_those_of_a_batch_bit_by_bit_or_nearly(client):
    together = client.complete(PROMPTS, echo=True, logprobs=0, max_tokens=0)["choices"]
    for prompt, choice in zip(PROMPTS, together, strict=True):
        (alone,) = client.complete(prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
        actual, expected = (x["logprobs"]["token_logprobs"][1:] for x in (choice, alone))
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        assert alone["logprobs"]["top_logprobs"] is None


def test_texts_get_bos_once_and_token_ids_none(client):
    lm = client.lm
    for text in ("ab cd", "<s>ab cd"):
        answer = client.complete(text, echo=True, logprobs=0, max_tokens=0)
        assert answer["usage"]["prompt_tokens"] == 6
        (choice,) = answer["choices"]
        assert choice["text"] == text
        scores = choice["logprobs"]["token_logprobs"]
        scores = scores[1:] if text.startswith("<s>") else scores  # what was sent comes back
        np.testing.assert_allclose(scores, -nll(lm, lm.encode("ab cd")), atol=2e-5)
    sent = client.complete(list(b"ab cd"), echo=True, logprobs=0, max_tokens=0)
    assert sent["usage"]["prompt_tokens"] == 5


@pytest.mark.slow
def test_sampled_texts_do_not_depend_on_other_requests(client):
    options = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "top_k": 40}
    alone = [client.complete(PROMPTS[1], seed=seed, **options) for seed in range(5)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(client.complete, PROMPTS[1], seed=s, **options) for s in range(5)]
        together = [job.result() for job in jobs]
    texts = [answer["choices"][0]["text"] for answer in alone]
    assert texts == [answer["choices"][0]["text"] for answer in together]
    assert len(set(texts)) > 1
    sampling = Sampling(max_new_tokens=8, temperature=1.0, top_p=0.9, top_k=40, seed=(3,))
    assert texts[3] == client.lm.generate([PROMPTS[1]], sampling)[0]
    several = client.complete(PROMPTS[1], n=3, seed=1, **options)["choices"]
    assert [choice["text"] for choice in several] == texts[1:4]
    free = [client.complete(PROMPTS[1], **options)["choices"][0]["text"] for _ in range(4)]
    assert len(set(free)) > 1  # without a seed there is a new one each time


def test_a_stream_is_the_whole_answer_in_pieces(client):
    body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "logprobs": 2, "echo": True}
    whole = client.post("completions", **body)
    chunks = client.stream("completions", **body, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for index, choice in enumerate(whole["choices"]):
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert len(parts) > 3
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            joined = [value for part in parts for value in part["logprobs"][name]]
            assert joined == pytest.approx(values) if name == "token_logprobs" else joined == values


def test_a_stop_string_ends_a_text_and_is_not_in_it(client):
    text = client.lm.generate([PROMPTS[0]], Sampling(max_new_tokens=24))[0]
    stop = next(text[i : i + 2] for i in range(2, len(text)) if text[i : i + 2].isascii())
    answer = client.complete(PROMPTS[0], max_tokens=24, stop=[stop, "zzz"])
    (choice,) = answer["choices"]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= 24
    assert client.complete(PROMPTS[0], max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_a_chat_follows_the_template_of_the_model(client):
    lm = client.lm
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    messages = [{"role": "user", "content": parts}]
    body = {"messages": messages, "max_completion_tokens": 9, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 3}
    answer = client.post("chat/completions", **body)
    (choice,) = answer["choices"]
    expected = lm.chat("What now?", Sampling(max_new_tokens=9))
    assert choice["message"]["content"] == expected
    prompt = lm.tokenizer.encode(
        lm.tokenizer.render_chat([{"role": "user", "content": "What now?"}])
    )
    content = choice["logprobs"]["content"]
    text = lm.generate([prompt], Sampling(max_new_tokens=9))[0]
    scores = nll(lm, [*prompt, *text.ids], len(prompt))
    np.testing.assert_allclose([entry["logprob"] for entry in content], -scores, atol=2e-5)
    for entry in content:
        assert entry["logprob"] == max(x["logprob"] for x in entry["top_logprobs"])
        assert len(entry["top_logprobs"]) == 3
    chunks = client.stream("chat/completions", **body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    unbounded = client.post("chat/completions", messages=messages, temperature=0)
    assert unbounded["usage"]["total_tokens"] <= 128  # of the trained length


def test_strings_of_tokens_are_all_different(client):
    vocabulary = client.server._vocabulary
    strings = [vocabulary[i] for i in range(client.lm.config.vocab_size)]
    assert len(set(strings)) == len(strings)
    assert vocabulary[ord("a")] == "a" and vocabulary[0xE2] == "token_id:226"
    assert math.isclose(sum(len(s) == 1 for s in strings), 128)
