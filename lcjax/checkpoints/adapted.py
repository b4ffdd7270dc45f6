"""A base with published adapters merged in, as one source of tensors.

Every matrix is W + scale * B A, summed in float32 for the rows that are read: no second copy of the
model exists. Embeddings and heads get new rows where the adapters have more of them than the base
(LongLoRA's [PAD], row 32000): the mean of the old rows unless the adapters bring them.
"""

import dataclasses
import math
import warnings
from typing import Any

import numpy as np

from lcjax.checkpoints import hf_names
from lcjax.checkpoints.adapter_folder import Adapters
from lcjax.checkpoints.weights import Source, TensorInfo, check, listed
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.rope import Default, DynamicNTK, Linear, Rope

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BY_TOKEN = (_EMBEDDING, _HEAD, "lm_head.bias")  # tensors with a row for each token
_CHUNK = 4_096  # rows read at once for a mean


class Adapted:
    """`base` under `adapters`; `config` describes the result (see `adapted_config`)."""

    def __init__(self, base: Source, adapters: Adapters, config: ModelConfig):
        self.path = f"{adapters.path} over {base.path}"
        self._base, self._adapters = base, adapters
        self._means: dict[str, np.ndarray] = {}
        self.tensors = dict(base.tensors)
        for name, (source, stored) in adapters.whole.items():
            self.tensors[name] = source.tensors[stored]
        for name in _BY_TOKEN:
            info = self.tensors.get(name)
            if info is not None and info.shape[0] < config.vocab_size:
                shape = (config.vocab_size, *info.shape[1:])
                self.tensors[name] = TensorInfo(shape, "float32")
        for name in adapters.low_rank:
            self.tensors[name] = TensorInfo(self.tensors[name].shape, "float32")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        source, stored = self._adapters.whole.get(name, (self._base, name))
        held = source.tensors[stored].shape[0]
        block = source.rows(stored, min(start, held), min(stop, held))
        if stop > held:
            mean = self._mean(source, stored)
            new = np.broadcast_to(mean, (stop - max(start, held), *mean.shape))
            block = np.concatenate([block.astype(np.float32), new])
        if name in self._adapters.low_rank:
            block = block.astype(np.float32) + self._adapters.low_rank[name].rows(start, stop)
        return block

    def _mean(self, source: Source, name: str) -> np.ndarray:
        """The mean of all rows that a tensor has, float32."""
        if name not in self._means:
            count = source.tensors[name].shape[0]
            total = 0.0
            for start in range(0, count, _CHUNK):
                rows = source.rows(name, start, min(start + _CHUNK, count))
                total = total + rows.astype(np.float64).sum(0)
            self._means[name] = np.asarray(total / count, np.float32)
        return self._means[name]


def adapted_config(
    base: Source, adapters: Adapters, config: ModelConfig, *, rows: int = 0
) -> ModelConfig:
    """The config of the base under the adapters, which must fit it.

    The vocabulary grows to the rows that the adapters bring, or to `rows`. A head that comes with
    the adapters of a tied model is a matrix of its own from then on.
    """
    check(base, config)
    whole = {
        name: source.tensors[stored].shape for name, (source, stored) in adapters.whole.items()
    }
    tied = config.tie_embeddings and _HEAD not in whole
    if tied and _EMBEDDING in whole and "embed_tokens" in adapters.saved_modules:
        raise InputError(
            f"{adapters.path}: modules_to_save has embed_tokens, which {base.path} uses as its head"
            " too, and not lm_head; merge the adapters with peft (merge_and_unload,"
            " save_pretrained) and give the result"
        )
    brought = [whole[name][0] for name in _BY_TOKEN if whole.get(name)]
    vocab_size = max(config.vocab_size, rows, *brought)
    result = config.replace(vocab_size=vocab_size, tie_embeddings=tied)
    _check_fit(base, adapters, whole, result)
    return result


def _check_fit(base: Source, adapters: Adapters, whole: dict[str, tuple], config: ModelConfig):
    """Lists every tensor of the adapters that has no place in the model, in one error."""
    wanted = {name: e.tensor_shape for e in hf_names.entries(config) for name in e.names}
    matrices = {
        name: (update.b.shape[0], update.a.shape[1]) for name, update in adapters.low_rank.items()
    }
    given = [*whole.items(), *matrices.items()]
    absent = [name for name, _ in given if name not in wanted]
    shaped = [
        f"{name} is for {list(shape)}, not {list(wanted[name])}"
        for name, shape in given
        if name in wanted and wanted[name] != shape
    ]
    kinds = (("not in the base", absent), ("wrong shape", shaped))
    if faults := [f"{kind}: {listed(names)}" for kind, names in kinds if names]:
        raise InputError(
            f"{adapters.path}: its adapters do not fit {base.path}; {'; '.join(faults)}; give the"
            " base that they were trained on: base=PATH (--base PATH)"
        )


def adapted_rope(
    config: ModelConfig, adapters: Adapters, own: Rope | None, context: int | None
) -> Rope:
    """The position method that the adapters were trained with.

    LongLoRA's files do not say it; it is `linear` with factor ceil(context / trained length), the
    trained length times the factor of a base that is interpolated already, as in the authors' code.

    Args:
      own: of a config.json beside the adapters; `context` goes before it.
      context: length that the adapters were trained for.
    """
    if context is not None:
        if not adapters.trainable:
            warnings.warn(
                f"{adapters.path}: no trainable_params.bin, so embeddings and norms stay those "
                "of the base; LongLoRA's adapters need that file, if it was published beside them",
                stacklevel=4,
            )
        return _interpolated(config, adapters, context)
    if own is not None:
        return own
    if adapters.trainable and isinstance(config.rope, Default):
        raise InputError(
            f"{adapters.path}: LongLoRA's adapters do not say for which length their positions "
            "were interpolated; give it: context=32768 (--context 32768) if it was trained at 32k"
        )
    return config.rope


def _interpolated(config: ModelConfig, adapters: Adapters, context: int) -> Rope:
    rope = config.rope
    if not isinstance(rope, Default | Linear):
        raise InputError(
            f"context={context} asks for interpolated positions (linear), but the base of "
            f"{adapters.path} has rope type {rope.type}; leave context (--context) out"
        )
    trained = config.max_length * getattr(rope, "factor", 1)
    if context <= trained:
        return rope
    return Linear(theta=rope.theta, factor=float(math.ceil(context / trained)))


def with_context(config: ModelConfig, context: int, where: Any) -> ModelConfig:
    """A whole model whose config leaves out the length that it was trained for.

    LCEG's NTK checkpoints (arXiv 2409.12181) are dynamic NTK never computed for less than their
    training length, and that length stands in the authors' code only.
    """
    if not isinstance(config.rope, DynamicNTK):
        raise InputError(
            f"context={context}: {where} is a whole model with rope type {config.rope.type}, which "
            "needs no such length: it is for LongLoRA's adapters and for models trained with "
            "dynamic NTK (LCEG's); leave context (--context) out"
        )
    return config.replace(rope=dataclasses.replace(config.rope, min_length=context))
