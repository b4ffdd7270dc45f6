"""The options of a server."""

import dataclasses
from typing import Annotated

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import (
    InputError,
    PositiveFloat,
    PositiveInt,
    Range,
    check_fields,
)
from lcjax.parallel.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server of one model with OpenAI's HTTP API.

    `--model PATH` is short for `--model.path=PATH`, and the other keys of `model` may omit the
    prefix `model.`: `--rope.type=yarn --rope.factor=4`.
    """

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    name: str | None = None  # name of the model in requests; null: its path
    host: str = "127.0.0.1"  # 0.0.0.0 accepts requests of other machines; then set api_key
    port: Annotated[int, Range(0, 65535)] = 8000  # 0: any free port
    api_key: str | None = None  # key that requests must send; null: none
    # Maximum tokens of a request, prompt and answer together. Rotations that follow the length are
    # made for it. null: the trained length, extended by the method's factor, and rotations for the
    # length of each request.
    length: Annotated[int, Range(2, hint="null takes that of the model")] | None = None
    # Read strings of special tokens in messages as special tokens, as transformers does
    allow_special: bool = False
    max_batch: PositiveInt = 8  # texts that are scored or generated together
    # Requests that wait or run; further ones are refused with status 503
    max_queue: PositiveInt = 64
    # Stored contexts; beyond this, the least recently used is dropped
    max_contexts: PositiveInt = 16
    # GB of stored contexts on the devices; a new one adds to it
    max_context_gb: PositiveFloat = 8.0
    # Seconds in which a client must send its request, and read on while its answer is sent.
    client_timeout: PositiveFloat = 60.0
    shutdown_timeout: PositiveFloat = 30.0  # seconds for running requests after SIGTERM or Ctrl-C
    mesh: Mesh | None = None  # devices that share the model; null: one device

    def __post_init__(self):
        if self.model.path is None and self.model.preset is None:
            raise InputError("model.path is missing; name a checkpoint: --model PATH")
        check_fields("", self)

    @property
    def model_name(self) -> str:
        return self.name or self.model.path or self.model.preset
