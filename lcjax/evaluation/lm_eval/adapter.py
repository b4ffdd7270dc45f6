"""A model of this library for lm-evaluation-harness's own programs.

import lm_eval
lm = LanguageModel.load("smollm2-135m-instruct", rope=Yarn(factor=4))
found = lm_eval.simple_evaluate(model=HarnessModel(lm, batch_size=16), tasks=["piqa"])
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from lcjax.errors import InputError
from lcjax.evaluation.lm_eval.answers import Answer, respond
from lcjax.evaluation.lm_eval.chat import conversation
from lcjax.evaluation.lm_eval.requests import Encoder, Request
from lcjax.parallel import distributed


class HarnessModel(TemplateLM):
    """`model` is a `LanguageModel`, with any method, or what `ContextSplit.of` makes of one.

    On several processes all of them call the harness alike; the mesh of `model` shares the work.
    """

    def __init__(
        self,
        model,
        *,
        max_length: int | None = None,
        batch_size: int = 1,
        max_gen_toks: int = 256,
        seed: int = 0,
    ):
        """`max_length`: tokens that it reads at most; None: what it was trained for."""
        super().__init__()
        config = model.config
        learned = getattr(config, "position", None) == "learned"
        self._length = config.max_length - learned if max_length is None else max_length
        self._model, self._batch, self._new = model, batch_size, max_gen_toks
        self._encoder = Encoder(model.tokenizer, self._length, max_gen_toks, seed)
        if getattr(model, "length", 0) is None:  # rotations as of the longest request
            self._model = model.with_method(length=self._length)

    @property
    def eot_token_id(self) -> int:
        ends = self._encoder.tokenizer.eos_ids
        return ends[0] if ends else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        return self._encoder.prefix

    @property
    def max_length(self) -> int:
        return self._length

    @property
    def max_gen_toks(self) -> int:
        return self._new

    @property
    def batch_size(self) -> int:
        return self._batch

    @property
    def tokenizer_name(self) -> str:
        return self._encoder.tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """What the template makes of a question: the name of the format, for results."""
        if chat_template is False or chat_template is None:
            return None
        return self.apply_chat_template([{"role": "user", "content": "text"}])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return conversation(self._encoder.tokenizer, chat_history, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self._encoder.ids(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        asked = [self._encoder.choice(prompt, rest) for _, prompt, rest in requests]
        names = [text for text, _, _ in requests]
        return self._respond("loglikelihood", asked, names, disable_tqdm)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        asked = [self._encoder.rolling(*request.args) for request in requests]
        names = [request.args for request in requests]
        return self._respond("loglikelihood_rolling", asked, names, disable_tqdm)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        seen: dict[str, int] = {}
        asked = []
        for request in requests:  # repetitions of a request are drawn anew
            name = json.dumps(request.args, default=str)
            seen[name] = seen.get(name, -1) + 1
            asked.append(self._encoder.writing(*request.args, repeat=seen[name]))
        names = [request.args for request in requests]
        return self._respond("generate_until", asked, names, disable_tqdm)

    def _respond(
        self, kind: str, asked: Sequence[Request], names: Sequence[Any], quiet: bool
    ) -> list[Any]:
        """Answers in order, each in the harness's cache (`use_cache`) as soon as it is there."""
        if not distributed.same(repr(asked)):
            raise InputError(
                "the processes of this job ask different questions; give all the same tasks, data"
                " and seeds, or run the tasks by eval.py, where the first process asks for all"
            )
        with tqdm(total=len(asked), desc=kind, disable=quiet or not distributed.first()) as bar:
            return respond(self._model, asked, self._batch, self._told(kind, names, bar))

    def _told(self, kind: str, names: Sequence[Any], bar: tqdm) -> Callable[[int, Answer], None]:
        def told(number: int, answer: Answer) -> None:
            bar.update(1)
            if names[number] is not None and distributed.first():
                self.cache_hook.add_partial(kind, names[number], answer)

        return told
