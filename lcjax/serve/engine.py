"""Runs the model in a single thread, in batches of waiting texts.

Texts wait in order of arrival. The first one runs with all others that may share its batch: texts
that are scored alike, or sampled with the same settings (each text has its own seed), and that have
the same context. A text is the same as when it runs alone; its log-probabilities may differ in the
last bits, as batches of different sizes are different programs.
"""

import asyncio
import dataclasses
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lcjax.errors import InputError
from lcjax.generation.generate import Piece, RowText
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling, TokenLogprobs, token_logprobs
from lcjax.generation.scoring import score_after_prefix, score_of_logits
from lcjax.generation.session import pad_right
from lcjax.serve.contexts import Context

# Number of most probable tokens that a request can list. The engine always computes all of them, so
# that requests share compiled programs and batches.
MAX_TOP = 20


class Call:
    """Passes the results of one request from the engine's thread to the event loop."""

    def __init__(self):
        self._loop, self._results = asyncio.get_running_loop(), asyncio.Queue()
        self.is_cancelled = False  # whether the request waits for no more results

    def put(self, result: Any) -> None:
        """Adds a result; may be called in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)

    async def get(self) -> Any:
        """Returns the next result; raises it if it is an exception."""
        result = await self._results.get()
        if isinstance(result, Exception):
            raise result
        return result


@dataclasses.dataclass(eq=False)
class Row:
    """A text of a request, which is continued if it has a `sampling`, else scored.

    The results of a continued text are `(index, Piece)`, the last one with a `finish`; a scored
    text has one result, `(index, Scores)`.

    Attributes:
      ids: token ids, including those of a context before the prompt.
      sampling: how the text is continued, without its seed; None: the text is scored.
      with_logprobs: whether a continued text has log-probabilities, as a scored one always has.
      first: the first token that is scored.
      scores_next: whether the most probable token after the text is scored, too.
    """

    call: Call
    index: int
    ids: Sequence[int]
    sampling: Sampling | None = None
    seed: int = 0
    with_logprobs: bool = False
    first: int = 1
    scores_next: bool = False
    context: Context | None = None
    has_results: bool = False
    is_finished: bool = False

    @property
    def key(self) -> tuple:
        """A key that is equal for texts that may share a batch."""
        context = self.context and self.context.id
        return self.sampling, self.with_logprobs, self.first, self.scores_next, context

    @property
    def is_done(self) -> bool:
        return self.is_finished or self.call.is_cancelled

    def put(self, result: Any, finished: bool) -> None:
        self.has_results, self.is_finished = True, finished
        self.call.put(result if isinstance(result, Exception) else (self.index, result))


@dataclasses.dataclass(eq=False)
class Task:
    """A function that the engine's thread calls; its result is passed to `call`."""

    call: Call
    function: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Scores:
    """log p of the tokens of a text from the first scored one on, and the next token if scored."""

    logprobs: tuple[TokenLogprobs, ...]
    next_piece: Piece | None = None


class Engine:
    """Runs the model in its own thread, for the requests of an event loop."""

    def __init__(self, lm: LanguageModel, max_batch: int = 8):
        self.lm, self.max_batch = lm, max_batch
        self._waiting: list[Row | Task] = []
        self._changed, self._stops = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="lcjax.serve", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, *jobs: Row | Task) -> None:
        with self._changed:
            self._waiting.extend(jobs)
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread after the running batch."""
        with self._changed:
            self._stops = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (jobs := self._next_jobs()) is not None:
            if isinstance(jobs[0], Task):
                self._run_task(jobs[0])
            else:
                self._run_rows(jobs)

    def _next_jobs(self) -> list[Any] | None:
        """Returns the first waiting job and the rows that share its batch; None: stop."""
        with self._changed:
            while True:
                self._waiting = [job for job in self._waiting if not job.call.is_cancelled]
                if self._stops:
                    return None
                if self._waiting:
                    break
                self._changed.wait()
            first, jobs, rest = self._waiting[0], [], []
            for job in self._waiting:
                fits = job is first or (
                    isinstance(job, Row) and isinstance(first, Row) and job.key == first.key
                )
                (jobs if fits and len(jobs) < self.max_batch else rest).append(job)
            self._waiting = rest
            return jobs

    def _run_task(self, task: Task) -> None:
        try:
            task.call.put(task.function())
        except Exception as error:
            _report(error)
            task.call.put(error)

    def _run_rows(self, rows: list[Row]) -> None:
        try:
            (self._score if rows[0].sampling is None else self._generate)(rows)
        except Exception as error:
            if len(rows) > 1 and not any(row.has_results for row in rows):
                for row in rows:  # the error may be due to one text, or to the size of the batch
                    self._run_rows([row])
                return
            _report(error)
            for row in rows:
                if not row.is_done:
                    row.put(error, finished=True)

    def _fill(self, rows: list[Row]) -> list[Row]:
        """Repeats the first row, up to `max_batch` or a power of two, for few compiled programs."""
        size = min(1 << (len(rows) - 1).bit_length(), self.max_batch)
        return [*rows, *[rows[0]] * (size - len(rows))]

    def _generate(self, rows: list[Row]) -> None:
        batch = self._fill(rows)
        seeds = tuple(row.seed for row in batch)
        sampling = dataclasses.replace(rows[0].sampling, seed=seeds)
        options: dict[str, Any] = rows[0].context.options if rows[0].context else {}
        if rows[0].with_logprobs:
            options = options | {"top_logprobs": MAX_TOP}
        pieces = self.lm.stream([row.ids for row in batch], sampling, **options)
        for piece in pieces:
            if piece.row < len(rows) and not rows[piece.row].is_done:
                rows[piece.row].put(piece, finished=piece.finish is not None)
            if all(row.is_done for row in rows):
                pieces.close()
                return

    def _score(self, rows: list[Row]) -> None:
        batch, first, context = self._fill(rows), rows[0].first, rows[0].context
        # Scoring any token (0) after a text also lists the most probable token in its place.
        texts = [[*row.ids, 0] if row.scores_next else list(row.ids) for row in batch]
        if context is not None and context.prefix is not None:
            behind = [text[first:] for text in texts]
            scores, start = (
                score_after_prefix(self.lm, _top_logprobs, context.ids, behind, context.prefix),
                0,
            )
        else:
            lengths = np.array([len(text) for text in texts])
            tokens = pad_right(texts, first + 1)
            options = {"context": context.encoded} if context and context.encoded else {}
            score = score_of_logits(_top_logprobs)
            scores = self.lm.score(score, tokens, first=first, lengths=lengths, **options)
            start = first
        for number, (row, text) in enumerate(zip(rows, texts, strict=False)):
            columns = (x[number, start : start + len(text) - first] for x in scores)
            logprobs = [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]
            following = self._next_piece(logprobs.pop()) if row.scores_next else None
            row.put(Scores(tuple(logprobs), following), finished=True)

    def _next_piece(self, logprobs: TokenLogprobs) -> Piece:
        """Returns the piece of the most probable token, the first alternative in `logprobs`."""
        best = logprobs._replace(logprob=logprobs.top_logprobs[0])
        text = RowText(0, self.lm.tokenizer, Sampling(max_new_tokens=1))
        return text.add(int(best.top_ids[0]), best)


def _top_logprobs(logits: jax.Array, targets: jax.Array) -> TokenLogprobs:
    return token_logprobs(logits, targets, MAX_TOP)


def _report(error: Exception) -> None:
    """Prints the traceback of an error, unless the client caused it."""
    if not isinstance(error, InputError):
        traceback.print_exception(error)
