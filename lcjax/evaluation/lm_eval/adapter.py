"""A model of this library for lm-evaluation-harness's own programs.

import lm_eval
lm = LanguageModel.load("smollm2-135m-instruct", rope=Yarn(factor=4))
results = lm_eval.simple_evaluate(model=HarnessModel(lm, batch_size=16), tasks=["piqa"])
"""

import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from lcjax.checkpoints.hf_config import announced_length
from lcjax.errors import InputError
from lcjax.evaluation.lm_eval.requests import Answer, Encoder, Request, render_chat, respond
from lcjax.generation.scorer import Scorer
from lcjax.parallel import distributed


class HarnessModel(TemplateLM):
    """A `Scorer`, such as a `LanguageModel`, as a model of the harness.

    With several processes, all of them run the same program, and the mesh of the model shards every
    batch.
    """

    def __init__(
        self,
        model: Scorer,
        *,
        max_length: int | None = None,
        batch_size: int = 1,
        max_gen_toks: int = 256,
        seed: int = 0,
    ):
        """Wraps a model.

        Args:
          model: A `Scorer`, such as a `LanguageModel` with any method or a `SplitModel`.
          max_length: Maximum tokens of a request; None for the length that the model reads with its
            method, as its export announces it.
          batch_size: Rows of every call of the model.
          max_gen_toks: New tokens of tasks that do not set a number.
          seed: Seed of sampled answers.
        """
        super().__init__()
        config = model.config
        learned = config.position == "learned"
        self._length = announced_length(config) - learned if max_length is None else max_length
        self._model, self._batch, self._new = model, batch_size, max_gen_toks
        self._encoder = Encoder(model.tokenizer, self._length, max_gen_toks, seed)

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
        """Returns the chat template applied to one question, to identify the format in results."""
        if chat_template is False or chat_template is None:
            return None
        return self.apply_chat_template([{"role": "user", "content": "text"}])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return render_chat(self._encoder.tokenizer, chat_history, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self._encoder.ids(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list, disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        encoded = [self._encoder.choice(prompt, rest) for _, prompt, rest in requests]
        names = [text for text, _, _ in requests]
        return self._respond("loglikelihood", encoded, names, disable_tqdm)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        encoded = [self._encoder.rolling(*request.args) for request in requests]
        names = [request.args for request in requests]
        return self._respond("loglikelihood_rolling", encoded, names, disable_tqdm)

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        repeats: dict[str, int] = {}
        encoded = []
        for request in requests:  # each repetition of a request has its own seed
            name = json.dumps(request.args, default=str)
            repeats[name] = repeats.get(name, -1) + 1
            encoded.append(self._encoder.generate_until(*request.args, repeat=repeats[name]))
        names = [request.args for request in requests]
        return self._respond("generate_until", encoded, names, disable_tqdm)

    def _respond(
        self, kind: str, requests: Sequence[Request], names: Sequence[Any], quiet: bool
    ) -> list[Any]:
        """Returns the answers in order, and adds each one to the harness's cache (`use_cache`)."""
        if not distributed.equal_on_all_processes(repr(requests)):
            raise InputError(
                "processes received different requests; use the same tasks, data and seeds on all,"
                " or run the tasks by eval.py, where the first process sends all requests"
            )
        quiet = quiet or not distributed.is_main_process()
        with tqdm(total=len(requests), desc=kind, disable=quiet) as bar:

            def on_answer(index: int, answer: Answer) -> None:
                bar.update(1)
                if names[index] is not None and distributed.is_main_process():
                    self.cache_hook.add_partial(kind, names[index], answer)

            batch = min(self._batch, len(requests) or 1)
            return respond(self._model, requests, batch, on_answer)
