"""Whatever JSON a body is, the status is 200 or 400 (404 for names), and the answer JSON."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from serve_support import serving
from tiny_lm import sharp_lm

from lcjax.serve.protocol import _COMMON, _NEUTRAL


@pytest.fixture(scope="module")
def client():
    with serving(sharp_lm(), length=48, max_context_gb=1e-4) as client:
        yield client


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=6),  # lone surrogates, too
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(-1, 260), max_size=60)
TEXTS = st.text(max_size=30)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "x"]), "content": TEXTS | ANY}
    ),
    max_size=3,
)
USUAL = {
    "prompt": TEXTS | TOKENS | st.lists(TEXTS, max_size=3) | st.lists(TOKENS, max_size=3),
    "messages": MESSAGES,
    "max_tokens": st.integers(-1, 9),
    "max_completion_tokens": st.integers(-1, 9),
    "temperature": st.sampled_from([0, 1, 1e-9, 2.5, -1, 1e300]),
    "top_p": st.floats(0, 1),
    "top_k": st.sampled_from([-1, 0, 1, 7, 2**31 - 1]),
    "min_tokens": st.integers(-1, 9),
    "n": st.integers(0, 3),
    "seed": st.integers(-(2**70), 2**70),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "logprobs": st.integers(-1, 21) | st.booleans(),
    "top_logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "text": TEXTS | st.lists(TEXTS, max_size=2),
    "tokens": TOKENS | st.lists(TOKENS, max_size=2),
    "name": TEXTS,
}
PATHS = {
    "completions": ("prompt", "max_tokens", "echo", "logprobs"),
    "chat/completions": ("messages", "max_completion_tokens", "logprobs", "top_logprobs"),
    "contexts": ("text", "tokens", "name"),
}


@st.composite
def bodies(draw):
    """A path, and a body with mostly usual values for it."""
    path = draw(st.sampled_from(sorted(PATHS)))
    names = [*PATHS[path], *([] if path == "contexts" else [*_COMMON, *_NEUTRAL])]
    required = ("prompt", "messages")
    chosen = {name for name in PATHS[path] if name in required}
    chosen |= draw(st.sets(st.sampled_from(names), max_size=5)) - {"stream", "model", "context"}
    usual = draw(st.integers(0, 9)) < 8
    body = {name: draw(USUAL.get(name, ANY) if usual else ANY) for name in sorted(chosen)}
    return path, body | (draw(st.dictionaries(TEXTS, ANY, max_size=1)) if not usual else {})


@pytest.mark.slow
@settings(
    max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(bodies())
def test_any_body_has_an_answer(client, case):
    path, body = case
    status, answer = client.ask("POST", f"/v1/{path}", body)
    assert status in (200, 400), (body, answer)
    if status == 400:
        assert answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert client.server._num_running == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_have_an_answer(client, data):
    status, answer = client.ask("POST", "/v1/completions", data)
    assert status in (200, 400) and answer
