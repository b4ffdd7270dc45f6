"""Converts OpenAI's JSON: bodies of requests to a `Plan`, and generated tokens to answers.

Fields that cannot change an answer are ignored. Unsupported fields that could change it raise an
error, unless they have a value without effect. Unknown fields raise an error, too, like unknown
keys of configs: a misspelt `max_tokns` would silently change the results of an evaluation.
"""

import collections
import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from lcjax.checkpoints.chat import ChatTokens, Message, read_message, with_objects
from lcjax.checkpoints.tokenizer import (
    TextStream,
    Tokenizer,
    check_template_variables,
    check_text,
    encode_mid_text,
    without_bos,
)
from lcjax.errors import InputError, check_integer, is_finite_number, suggestion
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling, TokenLogprobs
from lcjax.generation.session import check_token_ids
from lcjax.serve.contexts import Context, NotFoundError
from lcjax.serve.engine import MAX_TOP

MAX_ROWS = 1024  # texts of one request
_MESSAGE = ("role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id")
MAX_VALUES = 2**20  # values and keys of a body, which JSON's parser reads in a second at most
MAX_DIGITS = 20  # of an integer: 2**64 has as many
MAX_NAME = 1024  # characters of the name of a context
MAX_STOPS, MAX_STOP = 64, 1024  # stop strings of a request, and characters of each
_IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
_NEUTRAL: dict[str, tuple] = {  # the values that do not change an answer
    "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "length_penalty": (1,), "min_p": (0,), "logit_bias": ({},),
    "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "modalities": (["text"],), "use_beam_search": (False,),
    "ignore_eos": (False,), "skip_special_tokens": (True,), "stop_token_ids": ([],),
}  # fmt: skip
_COMMON = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_tokens", "n", "seed", "stop",
    "stream", "stream_options", "logprobs", "context",
)  # fmt: skip


def read_json(data: bytes | bytearray, length: int) -> dict[str, Any]:
    """Parses the JSON object of a body; raises an InputError if the body is no JSON object.

    No other thread runs while the parser does, so its work is limited before it starts.

    Args:
      data: the body.
      length: tokens of the longest prompt, which the body may have as ids in any case.
    """
    # Those in strings count, too: a longer text than any model reads has as many.
    count, most = sum(map(data.count, (b",", b":", b"[", b"{"))), max(MAX_VALUES, 2 * length)
    if count > most:
        raise InputError(
            f"the body has {count} commas, colons and brackets, more than {most}; send several"
            " bodies"
        )

    def refuse(constant: str):
        raise InputError(f"the body has {constant}, which is not valid JSON")

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > MAX_DIGITS:
            raise InputError(
                f"the body has an integer of {len(digits)} digits; at most {MAX_DIGITS} are read"
            )
        return int(digits)

    try:
        body = json.loads(data, parse_constant=refuse, parse_int=integer)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise InputError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InputError('the body must be a JSON object, such as {"prompt": "..."}')
    return body


def write_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt; the server added the first `num_added`: a context's ids, and BOS."""

    ids: tuple[int, ...]
    text: str
    num_added: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked request of `/v1/completions` or `/v1/chat/completions`."""

    is_chat: bool
    prompts: tuple[Prompt, ...]
    sampling: Sampling | None  # None: nothing is generated
    n: int = 1  # number of answers to each prompt
    seed: int = 0
    echo: bool = False
    top: int | None = None  # most probable tokens listed for each; None: no log-probabilities
    stream: bool = False
    include_usage: bool = False
    context: Context | None = None


class Fields:
    """The fields of a body, checked as they are read."""

    def __init__(self, body: dict[str, Any], known: Iterable[str]):
        known = (*_COMMON, *known)
        self._body = {name: value for name, value in body.items() if value is not None}
        for name, value in self._body.items():
            if name in known or name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                guess = suggestion(name, known)
                raise InputError(f"{name!r:.80} is no field of this request; {guess}")
            if value not in _NEUTRAL[name]:
                neutral = " or ".join(json.dumps(x) for x in _NEUTRAL[name])
                raise InputError(f"{name}={value!r:.80} is not supported; leave it at {neutral}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._body.get(name, default)
        if name in self._body and not isinstance(value, kind):
            names = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}
            raise InputError(f"{name}={value!r:.80} must be {names[kind]}")
        return value

    def any(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self._body.get(name, default)
        if value is not None:
            check_integer(name, value, least, most=most)
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name, default)
        if not is_finite_number(value):
            raise InputError(f"{name}={value!r:.80} must be a number")
        return value


@dataclasses.dataclass(frozen=True)
class Reader:
    """Converts bodies to plans.

    Attributes:
      lm: the model.
      name: name of the model in requests.
      length: maximum number of tokens of a prompt and its answer together.
      context: returns a context by its id.
      allow_special: whether special tokens in messages are read as special tokens.
    """

    lm: LanguageModel
    name: str
    length: int
    context: Callable[[str], Context]
    allow_special: bool = False

    def completions(self, body: dict[str, Any]) -> Plan:
        """Reads a body of `/v1/completions`."""
        fields = Fields(body, ("prompt", "echo"))
        context = self._context(fields)
        prompts = self._prompts(fields.any("prompt"), context)
        echo = fields.get("echo", bool, False)
        top = fields.integer("logprobs", None, 0, MAX_TOP)
        max_tokens = fields.integer("max_tokens", 16, 0, 2**24)
        return self._plan(fields, prompts, max_tokens, context=context, echo=echo, top=top)

    def chat(self, body: dict[str, Any]) -> Plan:
        """Reads a body of `/v1/chat/completions`."""
        names = ("messages", "top_logprobs", "max_completion_tokens", "chat_template_kwargs")
        fields = Fields(body, names)
        context, top = self._context(fields), None
        tokenizer = self.lm.tokenizer
        variables = check_template_variables(fields.any("chat_template_kwargs"))
        messages = [_message(message) for message in self._messages(fields)]

        def encode(messages: list[Message]) -> ChatTokens:
            self._check_length("the conversation", tokenizer.render_chat(messages, **variables))
            return tokenizer.encode_chat(messages, allow_special=self.allow_special, **variables)

        chat = with_objects(messages, encode)
        ids, text = chat.ids, chat.text
        if context is not None and context.precedes_text:
            ids = without_bos(ids, tokenizer.bos_id)  # BOS precedes the context instead
        prompt = self._after_context(context, ids, text, 0)
        if fields.get("logprobs", bool, False):
            top = fields.integer("top_logprobs", 0, 0, MAX_TOP)
        elif fields.integer("top_logprobs", 0, 0, MAX_TOP):
            raise InputError("top_logprobs is only given with logprobs=true")
        max_tokens = fields.integer("max_tokens", None, 1, 2**24)
        max_tokens = fields.integer("max_completion_tokens", max_tokens, 1, 2**24)
        if max_tokens is None:
            max_tokens = max(self.length - len(prompt.ids), 1)
        return self._plan(fields, (prompt,), max_tokens, context=context, top=top, is_chat=True)

    def _messages(self, fields: Fields) -> list[Any]:
        messages = fields.get("messages", list, [])
        if len(messages) > self.length:
            raise InputError(
                f"messages has {len(messages)} messages, more than the {self.length} tokens that"
                " this server takes; send fewer, or start it with a larger --length"
            )
        return messages

    def context_source(self, body: dict[str, Any]) -> tuple[Any, str | None]:
        """Reads a body of `/v1/contexts`: the source of a context, and its name."""
        sources = [body[key] for key in ("text", "tokens") if body.get(key) is not None]
        unknown = set(body) - {"text", "tokens", "name"}
        if unknown or len(sources) != 1:
            raise InputError('a context is {"text": ...} or {"tokens": ...}, and may have a "name"')
        (source,), name = sources, body.get("name")
        if not isinstance(source, str if isinstance(body.get("text"), str) else list):
            raise InputError("text must be a string or a list of strings, tokens a list of ids")
        if not isinstance(name, str | None):
            raise InputError(f"name={name!r:.80} must be a string")
        if len(name or "") > MAX_NAME:
            raise InputError(f"name has {len(name)} characters, more than {MAX_NAME}; shorten it")
        for text in [source] if isinstance(source, str) else source:
            if isinstance(text, str) != (body.get("text") is not None):
                raise InputError("text is for strings and tokens for lists of token ids")
            if isinstance(text, str):
                check_text(text)
        if isinstance(source, str) and self.lm.config.memory is None:
            self._check_length("the context", source)
        return source, name

    def _check_length(self, label: str, text: str) -> None:
        """Raises an InputError if a text has far more tokens than this server takes.

        Only the beginning of such a text is tokenised, as long as a usual text of that many tokens
        never is. The end of the beginning may have other tokens than in the whole text, so texts
        that are a little too long pass; they are counted later.
        """
        most, size = self.length + self.length // 4 + 64, 8 * self.length
        while size < len(text):
            count = len(self.lm.tokenizer.encode(text[:size], allow_special=True))
            if count > most:
                raise InputError(
                    f"{label} has {len(text)} characters, and its first {size} are {count} tokens,"
                    f" more than the {self.length} that this server takes; shorten it, or start"
                    " the server with a larger --length"
                )
            size *= 2

    def _plan(
        self, fields: Fields, prompts: tuple[Prompt, ...], max_tokens: int, **options: Any
    ) -> Plan:
        n = fields.integer("n", 1, 1, 128)
        if n * len(prompts) > MAX_ROWS:
            raise InputError(
                f"n={n} answers to {len(prompts)} prompts are more than the {MAX_ROWS} texts that"
                " a request may have"
            )
        for prompt in prompts:
            if len(prompt.ids) + max_tokens > self.length:
                total = len(prompt.ids) + max_tokens
                raise InputError(
                    f"the prompt has {len(prompt.ids)} tokens and max_tokens is {max_tokens}:"
                    f" together {total}, more than the {self.length} that this server takes;"
                    f" shorten the prompt, or start the server with --length={total}"
                )
        stream_options = fields.get("stream_options", dict, {})
        include_usage = stream_options.get("include_usage")
        is_known = stream_options.keys() <= {"include_usage", "include_obfuscation"}
        if not is_known or not isinstance(include_usage, bool | None):
            raise InputError(
                f"stream_options={stream_options!r:.80}: known: include_usage, true or false"
            )
        return Plan(
            prompts=prompts,
            sampling=_sampling(fields, max_tokens),
            n=n,
            seed=fields.integer("seed", uuid.uuid4().int % 2**32, -(2**63), 2**64) % 2**32,
            stream=fields.get("stream", bool, False),
            include_usage=bool(include_usage),
            **{"is_chat": False, **options},
        )

    def _context(self, fields: Fields) -> Context | None:
        model = fields.get("model", str, self.name)
        if model != self.name:
            raise NotFoundError(f"model={model!r:.80} does not exist; this server has {self.name}")
        name = fields.get("context", str)
        return None if name is None else self.context(name)

    def _prompts(self, prompt: Any, context: Context | None) -> tuple[Prompt, ...]:
        """Reads a text, token ids, or a list of either."""
        form = "prompt must be a text, a list of token ids, or a list of either"
        if prompt is None or prompt == []:
            raise InputError(f"{form}; it is missing or empty")
        if not isinstance(prompt, str | list):
            raise InputError(f"{form}, not {prompt!r:.80}")
        is_one = isinstance(prompt, str) or not isinstance(prompt[0], str | list)
        many = [prompt] if is_one else prompt
        if len(many) > MAX_ROWS:
            raise InputError(f"prompt has {len(many)} texts, more than {MAX_ROWS}")
        return tuple(self._prompt(one, context) for one in many)

    def _prompt(self, prompt: Any, context: Context | None) -> Prompt:
        tokenizer = self.lm.tokenizer
        if isinstance(prompt, str):
            self._check_length("the prompt", prompt)
        else:  # token ids are read as they are
            if not isinstance(prompt, list):
                raise InputError(
                    f"prompt: {prompt!r:.80} is neither a text nor a list of token ids"
                )
            ids = check_token_ids("prompt", prompt, self.lm.config.vocab_size).tolist()
            return self._after_context(context, ids, None, 0)
        if context is not None and context.precedes_text:
            ids = encode_mid_text(tokenizer, prompt, allow_special=True)
            return self._after_context(context, ids, prompt, 0)
        ids = list(tokenizer.encode(prompt, allow_special=True))
        if tokenizer.add_bos and ids[:1] != [tokenizer.bos_id]:
            return self._after_context(context, [tokenizer.bos_id, *ids], prompt, 1)
        return self._after_context(context, ids, prompt, 0)

    def _after_context(
        self, context: Context | None, ids: Sequence[int], text: str | None, num_added: int
    ) -> Prompt:
        """Returns a prompt after the tokens of a context; the server added `num_added` of `ids`."""
        if not ids:
            raise InputError("prompt is empty, and this model begins no text with BOS")
        before = () if context is None else context.ids
        if text is None:  # a prompt that is too long is refused later
            text = self.lm.tokenizer.decode(ids) if len(ids) <= self.length else ""
        return Prompt((*before, *ids), text, len(before) + num_added)


def _sampling(fields: Fields, max_tokens: int) -> Sampling | None:
    stop = fields.any("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if isinstance(stop, list) and (
        len(stop) > MAX_STOPS or any(isinstance(x, str) and len(x) > MAX_STOP for x in stop)
    ):
        raise InputError(
            f"stop has more than {MAX_STOPS} strings, or one of more than {MAX_STOP} characters"
        )
    top_k = fields.integer("top_k", None, -1, 2**31 - 1)
    settings = Sampling(
        max_new_tokens=max(max_tokens, 1),
        min_new_tokens=fields.integer("min_tokens", 0, 0, 2**24),
        temperature=float(fields.number("temperature", 1.0)),
        top_k=None if top_k in (None, -1, 0) else top_k,
        top_p=float(fields.number("top_p", 1.0)),
        stop=tuple(stop) if isinstance(stop, list) else stop,
    )
    return settings if max_tokens else None


def _message(message: Any) -> dict[str, Any]:
    """Returns the fields of a message that have a value.

    Raises:
      InputError: a field is not one that chat templates read, or has a wrong type.
    """
    if not isinstance(message, dict):
        raise InputError(f"messages: {message!r:.80} is no object with role and content")
    fields = {name: value for name, value in message.items() if value not in (None, [])}
    for name, value in fields.items():
        if name not in _MESSAGE:
            raise InputError(
                f"messages: {name}={value!r:.80} is not supported; {suggestion(name, _MESSAGE)}"
            )
        if name not in ("content", "tool_calls") and not isinstance(value, str):
            raise InputError(f"messages: {name}={value!r:.80} must be a string")
    return read_message(fields, "messages")


class Vocabulary:
    """A unique string for each token, by which evaluation harnesses distinguish tokens.

    It is the text that the token adds in the middle of a text, or `token_id:N` if that is no whole
    character, or is also the text of another token.
    """

    def __init__(self, tokenizer: Tokenizer, size: int):
        self.tokenizer = tokenizer
        anchor = list(tokenizer.encode("a"))
        before = len(tokenizer.decode(anchor))
        size_known = min(size, tokenizer.vocab_size)
        texts = [tokenizer.decode([*anchor, i])[before:] for i in range(size_known)]
        counts = collections.Counter(texts)
        is_plain = [text and "\ufffd" not in text and counts[text] == 1 for text in texts]
        self._texts = [text if plain else None for text, plain in zip(texts, is_plain)]
        self._texts += [None] * (size - size_known)

    def text(self, index: int) -> str | None:
        return self._texts[index]

    def __getitem__(self, index: int) -> str:
        return self._texts[index] or f"token_id:{index}"


class Answer:
    """The JSON of an answer, whole or chunk by chunk."""

    def __init__(self, plan: Plan, model: str, vocabulary: Vocabulary):
        self._plan, self._vocabulary = plan, vocabulary
        kind = "chatcmpl" if plan.is_chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._model = model
        self._streams: dict[int, TextStream] = {}  # of each choice, for offsets
        self._offsets: dict[int, int] = collections.Counter()
        self._with_role: set[int] = set()  # choices whose first chunk was sent
        self.completion_tokens = 0

    @property
    def usage(self) -> dict[str, Any]:
        prompt, new = sum(len(p.ids) for p in self._plan.prompts), self.completion_tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": new}
        usage["total_tokens"] = prompt + new
        context = self._plan.context
        if context is not None and context.prefix is not None:
            cached = context.prefix.tokens * len(self._plan.prompts)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def response(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Returns the whole answer that consists of all pieces; their rows are choices."""
        by_choice: dict[int, list[Piece]] = collections.defaultdict(list)
        for piece in pieces:
            by_choice[piece.row].append(piece)
        choices = []
        for index, parts in sorted(by_choice.items()):
            text = "".join(part.text for part in parts)
            ids = [token for part in parts for token in part.ids]
            logprobs = self._logprobs(index, ids, [x for part in parts for x in part.logprobs])
            choice: dict[str, Any] = {"index": index, "logprobs": logprobs}
            if self._plan.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice | {"finish_reason": parts[-1].finish or "length"})
        kind = "chat.completion" if self._plan.is_chat else "text_completion"
        return self._with_head(kind, choices) | {"usage": self.usage}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Returns the chunks of a stream for one piece."""
        index, chunks = piece.row, []
        logprobs = self._logprobs(index, piece.ids, piece.logprobs)
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": None}
        if not self._plan.is_chat:
            choice |= {"text": piece.text, "finish_reason": piece.finish}
            return [self._chunk([choice])]
        if index not in self._with_role:
            self._with_role.add(index)
            role = {"role": "assistant", "content": ""}
            chunks.append(self._chunk([choice | {"delta": role, "logprobs": None}]))
        content = {"content": piece.text} if piece.text or logprobs else {}
        chunks.append(self._chunk([choice | {"delta": content, "finish_reason": piece.finish}]))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([]) | {"usage": self.usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._plan.is_chat else "text_completion"
        usage = {"usage": None} if self._plan.include_usage else {}
        return self._with_head(kind, choices) | usage

    def _with_head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model, "choices": choices}

    def _logprobs(
        self, choice: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        top = self._plan.top
        if top is None:
            return None
        if self._plan.is_chat:
            content = [self._entry(i, x, top) for i, x in zip(ids, logprobs, strict=True)]
            return {"content": content, "refusal": None}
        stream = self._streams.setdefault(choice, TextStream(self._vocabulary.tokenizer))
        tokens, offsets, tops = [], [], []
        for token, entry in zip(ids, logprobs, strict=True):
            tokens.append(self._vocabulary[token])
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(stream.push(token))
            tops.append(None if entry is None or not top else dict(self._alternatives(entry, top)))
        values = [None if entry is None else _finite(entry.logprob) for entry in logprobs]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, (tokens, values, tops if top else None, offsets), strict=True))

    def _alternatives(self, entry: TokenLogprobs, top: int) -> list[tuple[str, float]]:
        pairs = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
        return [(self._vocabulary[int(i)], _finite(value)) for i, value in pairs]

    def _entry(self, token: int, logprobs: TokenLogprobs, top: int) -> dict[str, Any]:
        def entry(index: int, value: np.ndarray) -> dict[str, Any]:
            text = self._vocabulary.text(index)
            as_bytes = None if text is None else list(text.encode())
            name, logprob = self._vocabulary[index], _finite(value)
            return {"token": name, "logprob": logprob, "bytes": as_bytes}

        pairs = zip(logprobs.top_ids[:top], logprobs.top_logprobs[:top], strict=True)
        alternatives = [entry(int(i), value) for i, value in pairs]
        return entry(token, logprobs.logprob) | {"top_logprobs": alternatives}


def _finite(value: Any) -> float:
    """Returns log p as a JSON number: -inf becomes -9999, as in vLLM."""
    return max(float(value), -9999.0)
