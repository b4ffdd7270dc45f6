"""Defines `InferenceModel`: a decoder, its weights and tokenizer, and the rotation of each request.

Sessions, scoring, generation and contexts read text with it. `LanguageModel` adds them as methods.
"""

from collections.abc import Sequence

import jax

from lcjax.checkpoints import Tokenizer
from lcjax.errors import InputError, check_arguments, check_flags, check_integer
from lcjax.generation.readings import Readings
from lcjax.models import Decoder, ModelConfig, unstack_layers
from lcjax.rope import Rope, Rotation, stack_rotations


class InferenceModel:
    """A decoder with its weights and tokenizer, and the rotation of each request.

    Layers are not stacked (`scan_layers=False`): a scanned layer would copy its weights and its
    part of the cache out of the stack for every token.

    Attributes:
      model: the decoder.
      params: its parameters.
      tokenizer: encodes and decodes text.
      length: minimum number of tokens that rotations are made for; None: the length of each call.
    """

    def __init__(self, model: Decoder, params: dict, tokenizer: Tokenizer):
        """Wraps a decoder and its parameters.

        Args:
          model: the decoder. Its parameters must be laid out on its mesh as
            `lcjax.parallel.sharding.param_shardings` says.
          params: the parameters. Stacked layers are unstacked, which copies them; `load` makes no
            copy.
          tokenizer: encodes and decodes text.
        """
        config = model.config.for_inference()
        self.params = unstack_layers(params, config) if config.stacked else params
        self.model = Decoder(config.replace(scan_layers=False), model.mesh)
        self.tokenizer = tokenizer
        self.length: int | None = None  # set by `with_method`
        self._rotations: dict[int, Rotation] = {}
        # Prompts before their cut, which the results of `with_method` share; None: none are kept
        self.readings: Readings | None = None

    @property
    def config(self) -> ModelConfig:
        """The config of the decoder, with the method."""
        return self.model.config

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that share weights, rows and caches; None: everything is on one device."""
        return self.model.mesh

    @property
    def depends_on_length(self) -> bool:
        """Whether `rotation` changes with the length of a request."""
        return self.config.depends_on_length

    @check_arguments
    def rotation(self, length: int) -> Rotation:
        """Returns the rotation of queries and keys in a request of `length` tokens."""
        length = max(length, self.length or 0)
        if length not in self._rotations:
            # Cached: a learned rope solves a differential equation for each length.
            self._rotations[length] = self.config.rotation(length, self.params.get("rope"))
        return self._rotations[length]

    @check_arguments
    def rotations(self, lengths: Sequence[int]) -> Rotation:
        """Returns the rotation of a batch of requests: one for all, or stacked if they differ.

        Each row is rotated for its own length, so its results do not depend on the other rows.
        """
        if not len(lengths):
            raise InputError("lengths has no request; give one length or more")
        for length in lengths:
            check_integer("lengths: one", length, 0)
        lengths = [max(int(length), self.length or 0) for length in lengths]
        if not self.depends_on_length or len(set(lengths)) == 1:
            return self.rotation(max(lengths))
        return stack_rotations([self.rotation(length) for length in lengths])

    @property
    def prefix_rope(self) -> Rope | None:
        """RoPE method of the windows before a text; None without a prefix memory."""
        memory = self.config.memory
        return self.config.rope if memory is not None and memory.is_prefix else None

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Encodes a text; BOS precedes it if the model expects one and it `begins` a sequence."""
        check_flags(begins=begins)
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if begins and self.tokenizer.add_bos else ids
