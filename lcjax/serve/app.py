"""The HTTP routes, on Starlette and uvicorn.

The standard library's ThreadingHTTPServer would be enough for one client. These two also detect
that a client disconnects while its answer is computed, finish running answers when the server is
stopped, and read requests in pieces with limits, all in a few lines here. Both are small and have
no compiled parts.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lcjax.checkpoints.hf_config import announced_length
from lcjax.errors import InputError, OutOfMemoryError, one_line
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.serve.contexts import Context, ContextStore, NotFoundError, make_context
from lcjax.serve.engine import Call, Engine, Row, Task
from lcjax.serve.protocol import Answer, Plan, Reader, Vocabulary, read_json, write_json
from lcjax.serve.serve_config import ServeConfig

MAX_BODY = 64 * 2**20  # bytes of a request
MAX_BODIES = 4 * MAX_BODY  # bytes of all requests that are not converted yet
_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class Server:
    """Serves a model by HTTP; `app` is the ASGI application."""

    def __init__(self, lm: LanguageModel, config: ServeConfig):
        needs_length = config.length is not None and lm.length is None
        self._lm = lm.with_method(length=config.length) if needs_length else lm
        self._config, self._created = config, int(time.time())
        length = config.length or announced_length(lm.config)
        self._contexts = ContextStore(config.max_contexts, config.max_context_gb * 1e9)
        self._reader = Reader(
            self._lm, config.model_name, length, self._contexts.get, config.allow_special
        )
        self._vocabulary = Vocabulary(lm.tokenizer, lm.config.vocab_size)
        self._engine = Engine(self._lm, config.max_batch)
        self._num_running = 0  # number of requests that wait or run
        self._bodies = _Bodies(config.client_timeout)

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self._engine.stop)

        reader = self._reader
        self.app = Starlette(
            lifespan=lifespan,
            routes=[
                self._route("GET", "/health", self._health, is_open=True),
                self._route("GET", "/v1/models", self._models),
                self._route("GET", "/v1/models/{model:path}", self._model),
                self._route(
                    "POST", "/v1/completions", functools.partial(self._answer, reader.completions)
                ),
                self._route(
                    "POST", "/v1/chat/completions", functools.partial(self._answer, reader.chat)
                ),
                self._route("GET", "/v1/contexts", self._list_contexts),
                self._route("POST", "/v1/contexts", self._add_context),
                self._route("GET", "/v1/contexts/{id}", self._get_context),
                self._route("DELETE", "/v1/contexts/{id}", self._delete_context),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _route(
        self,
        method: str,
        path: str,
        handle: Callable[[Request], Awaitable[Response]],
        is_open: bool = False,
    ) -> Route:
        """Returns a route that turns errors into JSON, and logs a line for each request."""

        async def endpoint(request: Request) -> Response:
            request.state.start, request.state.note = time.monotonic(), ""
            try:
                if not is_open:
                    self._authorize(request)
                response = await handle(request)
            except Exception as error:
                response = _error_response(error)
                request.state.note = f" {one_line(error)[:200]}"
            if not isinstance(response, StreamingResponse) and not is_open:
                _log(request, response.status_code)
            return response

        return Route(path, endpoint, methods=[method])

    def _authorize(self, request: Request) -> None:
        key = self._config.api_key
        if key is None:
            return
        header = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(header, f"Bearer {key}".encode()):
            raise HTTPException(
                401, "the header `Authorization: Bearer KEY` lacks this server's key"
            )

    async def _health(self, request: Request) -> Response:
        is_alive = self._engine.is_alive
        status = {"status": "ok" if is_alive else "failed", "running": self._num_running}
        return _json(status, 200 if is_alive else 503)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["model"]) != self._config.model_name:
            raise NotFoundError(
                f"model={name!r:.80} does not exist; this server has {self._config.model_name}"
            )
        return _json(self._model_json())

    def _model_json(self) -> dict[str, Any]:
        model = {"id": self._config.model_name, "object": "model", "created": self._created}
        return model | {"owned_by": "lcjax", "max_model_len": self._reader.length}

    # Contexts

    async def _list_contexts(self, request: Request) -> Response:
        return _json({"object": "list", "data": [c.as_json() for c in self._contexts]})

    async def _get_context(self, request: Request) -> Response:
        return _json(self._contexts.get(request.path_params["id"]).as_json())

    async def _delete_context(self, request: Request) -> Response:
        name = request.path_params["id"]
        self._contexts.delete(name)
        return _json({"id": name, "object": "context", "deleted": True})

    async def _add_context(self, request: Request) -> Response:
        def make() -> Context:  # stored before the next is made, so that old contexts are dropped
            context = make_context(self._lm, source, name, self._reader.length)
            if not call.is_cancelled:  # a client that has left does not learn the id
                self._contexts.add(context)
            return context

        async with contextlib.AsyncExitStack() as stack:
            (source, name), call = await self._read(self._reader.context_source, request, stack)
            self._engine.submit(Task(call, make))
            context: Context = await _unless_disconnected(request, call.get())
        request.state.note = f" {context.tokens} tokens"
        return _json(context.as_json())

    # Answers

    @contextlib.contextmanager
    def _running(self):
        """Yields the call of a request; raises 503 if too many run."""
        if self._num_running >= self._config.max_queue:
            raise HTTPException(
                503,
                f"{self._num_running} requests wait or run, and this server takes no more at once"
                " (--max_queue); try again later",
                headers={"Retry-After": "1"},
            )
        self._num_running += 1
        call = Call()
        try:
            yield call
        finally:
            call.is_cancelled = True
            self._num_running -= 1

    async def _read(
        self, convert: Callable[[dict], Any], request: Request, stack: contextlib.AsyncExitStack
    ) -> tuple[Any, Call]:
        """Returns the converted body of a request, and its call, which ends with `stack`.

        A request takes its place in the queue after its body was read, however slowly.
        """
        async with self._bodies.read(request) as body:
            call = stack.enter_context(self._running())
            # In a thread, because long texts take seconds.
            length = self._reader.length
            return await asyncio.to_thread(lambda: convert(read_json(body, length))), call

    async def _answer(self, read: Callable[[dict], Plan], request: Request) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            plan, call = await self._read(read, request, stack)
            answer = Answer(plan, self._config.model_name, self._vocabulary)
            pieces = self._pieces(plan, answer, call)
            await stack.enter_async_context(contextlib.aclosing(pieces))
            if not plan.stream:
                whole = answer.response(await _unless_disconnected(request, _collect(pieces)))
                request.state.note = _usage_note(answer)
                return _json(whole)
            # Errors of a request are raised before its first token, while the status can be set.
            first = await _unless_disconnected(request, anext(pieces, None))
            return _EventStream(self._events(plan, answer, first, pieces, request), stack.pop_all())

    async def _pieces(self, plan: Plan, answer: Answer, call: Call) -> AsyncIterator[Piece]:
        """Runs a plan: yields the prompts with `echo`, then the generated text.

        The row of a piece is the index of its choice. The tokens of a prompt that are not scored
        have None in its `logprobs`.
        """
        following: dict[int, Piece] = {}  # next tokens that were found while scoring prompts
        if plan.echo:
            async for piece in self._echo(plan, call, following):
                yield piece
        rows = []
        for choice in range(len(plan.prompts) * plan.n):
            if (piece := following.get(choice)) is not None:
                answer.completion_tokens += len(piece.ids)
                yield piece
            elif plan.sampling is None:
                if not plan.echo:
                    yield Piece(choice, "", (), "length")
            else:
                ids, seed = plan.prompts[choice // plan.n].ids, (plan.seed + choice) % 2**32
                options = {"with_logprobs": plan.top is not None, "context": plan.context}
                rows.append(Row(call, choice, ids, plan.sampling, seed, **options))
        self._engine.submit(*rows)
        num_left = len(rows)
        while num_left:
            choice, piece = await call.get()
            num_left -= piece.finish is not None
            answer.completion_tokens += len(piece.ids)
            yield dataclasses.replace(piece, row=choice)

    async def _echo(
        self, plan: Plan, call: Call, following: dict[int, Piece]
    ) -> AsyncIterator[Piece]:
        """Yields the prompts, scored if the plan requests log-probabilities.

        If only the single most probable token is generated, scoring finds it, and it is added to
        `following`.
        """
        finish = None if plan.sampling else "length"
        scores: list[Any] = [None] * len(plan.prompts)
        if plan.top is not None:
            rows = [
                Row(
                    call, number, prompt.ids, first=max(prompt.num_added, 1),
                    scores_next=self._scores_next(plan), context=plan.context,
                )
                for number, prompt in enumerate(plan.prompts)
            ]  # fmt: skip
            self._engine.submit(*rows)
            for _ in rows:
                number, result = await call.get()
                scores[number] = result
        for choice in range(len(plan.prompts) * plan.n):
            prompt, score = plan.prompts[choice // plan.n], scores[choice // plan.n]
            ids, logprobs = prompt.ids[prompt.num_added :], ()
            if score is not None:
                logprobs = (*[None] * (len(ids) - len(score.logprobs)), *score.logprobs)
                if (next_ := score.next_piece) is not None:
                    following[choice] = dataclasses.replace(next_, row=choice)
            yield Piece(choice, prompt.text, ids, finish, logprobs)

    def _scores_next(self, plan: Plan) -> bool:
        """Returns whether the generated text is only the most probable token after the prompt.

        Scoring the prompt then also finds this token. It does not if the rotation follows the
        length, because the rotation for one more token differs.
        """
        sampling, lm = plan.sampling, self._lm
        return (
            sampling is not None
            and sampling.max_new_tokens == 1
            and not (sampling.temperature or sampling.min_new_tokens or sampling.stop)
            and (not lm.depends_on_length or lm.length is not None)
        )

    async def _events(
        self,
        plan: Plan,
        answer: Answer,
        first: Piece | None,
        pieces: AsyncIterator[Piece],
        request: Request,
    ) -> AsyncIterator[bytes]:
        """Yields the server-sent events of a stream."""
        status: int | str = "left"
        try:
            piece = first
            while piece is not None:
                for chunk in answer.chunks(piece):
                    yield _event(write_json(chunk))
                piece = await anext(pieces, None)
            if plan.include_usage:
                yield _event(write_json(answer.usage_chunk()))
            yield _event(b"[DONE]")
            status = 200
        except Exception as error:  # the status has been sent
            response = _error_response(error)
            status = response.status_code
            yield _event(response.body)
        finally:
            request.state.note = _usage_note(answer)
            _log(request, status)


class _EventStream(StreamingResponse):
    """Server-sent events that close `stack` at their end, or when the client disconnects."""

    def __init__(self, events: AsyncIterator[bytes], stack: contextlib.AsyncExitStack):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._stack = events, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack, contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)


async def _collect(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


class _Bodies:
    """Reads bodies of requests, each within `timeout` seconds, all within `MAX_BODIES` bytes."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._unread: dict[asyncio.Timeout, bytearray] = {}  # by their time limits
        self._num_read = 0  # bytes of bodies that are read, but not converted

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Yields the body of a request, which counts until the context ends."""
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                body = await self._read(request, limit)
        except TimeoutError:
            message = (
                f"the body did not arrive within {self._timeout:g} s (--client_timeout), or was the"
                f" longest of more than {MAX_BODIES // 2**20} MiB at once; send it again"
            )
            raise HTTPException(408, message, headers={"Connection": "close"}) from None
        finally:
            self._unread.pop(limit, None)
        size = len(body)
        self._num_read += size
        try:
            yield body
        finally:
            self._num_read -= size

    async def _read(self, request: Request, limit: asyncio.Timeout) -> bytearray:
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size[:20]) > MAX_BODY:
            raise _too_large()
        body = self._unread[limit] = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise _too_large()
            if self._num_read + sum(map(len, self._unread.values())) > MAX_BODIES:
                longest = max(self._unread, key=lambda limit: len(self._unread[limit]))
                self._unread.pop(longest)
                longest.reschedule(asyncio.get_running_loop().time())
        return body


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {MAX_BODY // 2**20} MiB")


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """Returns the result of `work`, which is cancelled if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    client = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, client}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect()
        return task.result()
    finally:
        client.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(write_json(value), status, headers, media_type="application/json")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _error_response(error: Exception) -> Response:
    """Returns OpenAI's JSON of an error; prints the traceback of errors of the server."""
    headers = None
    if isinstance(error, InputError):
        status, message = 400, str(error)
    elif isinstance(error, NotFoundError):
        status, message = 404, str(error)
    elif isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, error.headers
    elif isinstance(error, ClientDisconnect):
        status, message = 499, "the client has left"
    elif isinstance(error, OutOfMemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        status = 503
        message = "the device has too little memory for this request; shorten it or send fewer"
    else:
        traceback.print_exception(error)
        status, message = 500, f"{type(error).__name__}: {error}"
    message = " ".join(message.split())[:1000]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    content = {"message": message, "type": kind, "param": None, "code": None}
    return _json({"error": content}, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns the errors for unknown paths and methods."""
    if error.status_code == 404:
        error = NotFoundError(f"{request.url.path[:80]} is no path of this server; see /v1/models")
    return _error_response(error)


def _usage_note(answer: Answer) -> str:
    usage = answer.usage
    return f" prompt={usage['prompt_tokens']} completion={usage['completion_tokens']}"


def _log(request: Request, status: int | str) -> None:
    seconds = time.monotonic() - request.state.start
    words = f"{request.method} {request.url.path[:80]} {status}{request.state.note}"
    print(f"{time.strftime('%H:%M:%S')} {words} {seconds:.2f} s", file=sys.stderr, flush=True)
