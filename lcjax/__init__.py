"""Long-context methods for language models in JAX: train, evaluate and compare them on one model
implementation.

    lm = lcjax.LanguageModel.load("smollm2-135m-instruct", rope=lcjax.rope.Yarn(factor=4))
    print(lm.chat("What is a dog?"))

Importing lcjax imports nothing else: each name below is imported from its module on first use.

Letters used for array axes everywhere: `B` batch, `T` query length, `S` key length, `N` query
heads, `K` key/value heads, `G = N/K`, `H` head size, `D` model width, `F` feed-forward width,
`V` vocabulary, `L` layers, `C` context chunks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors; at run time `__getattr__` imports these names
    from lcjax import (
        attention,
        checkpoints,
        cost,
        data,
        evaluation,
        models,
        retrieval,
        rope,
        training,
    )
    from lcjax.checkpoints.build import ModelSection
    from lcjax.errors import InputError
    from lcjax.generation.conversation import Conversation
    from lcjax.generation.language_model import LanguageModel
    from lcjax.generation.replug import Replug
    from lcjax.generation.sampling import Sampling
    from lcjax.generation.shared_prefix import read_prefix
    from lcjax.parallel.sharding import Mesh
    from lcjax.retrieval.reader import RetrievalReader

    __version__: str

_MODULES = (
    "attention",
    "checkpoints",
    "cost",
    "data",
    "evaluation",
    "models",
    "retrieval",
    "rope",
    "training",
)
_NAMES = {
    "Conversation": "lcjax.generation.conversation",
    "InputError": "lcjax.errors",
    "LanguageModel": "lcjax.generation.language_model",
    "Mesh": "lcjax.parallel.sharding",
    "ModelSection": "lcjax.checkpoints.build",
    "Replug": "lcjax.generation.replug",
    "RetrievalReader": "lcjax.retrieval.reader",
    "Sampling": "lcjax.generation.sampling",
    "read_prefix": "lcjax.generation.shared_prefix",
}

__all__ = [
    "Conversation",
    "InputError",
    "LanguageModel",
    "Mesh",
    "ModelSection",
    "Replug",
    "RetrievalReader",
    "Sampling",
    "__version__",
    "attention",
    "checkpoints",
    "cost",
    "data",
    "evaluation",
    "models",
    "read_prefix",
    "retrieval",
    "rope",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"lcjax.{name}")
    elif name == "__version__":
        value = _version()
    else:
        raise AttributeError(f"module 'lcjax' has no attribute {name!r}")
    globals()[name] = value  # later uses do not call `__getattr__`
    return value


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lcjax")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from a source folder that is not installed


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
