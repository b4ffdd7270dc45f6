"""Registers the papers' mixtures with seqio when it is imported.

    data:
      sources:
      - {type: seqio, task: lcjax_cepe, module: lcjax.data.seqio_corpora,
         converter: chunks, context: context}

Mixtures `lcjax_cepe` (2:1 of `lcjax_cepe_filter` and `lcjax_cepe_cat`) and
`lcjax_slimpajama_upsampled`, of rows as `lcjax.data.corpora` says. They lie in the folder `data`,
or in that of the environment variable LCJAX_CORPORA, where `python -m lcjax.data prepare` put them;
nothing is opened before the first row is read.
"""

import os
from pathlib import Path

from lcjax.data import corpora
from lcjax.data.prepare import TOKENIZER
from lcjax.data.seqio_chunks import import_seqio
from lcjax.data.seqio_tasks import register

FOLDER = os.environ.get("LCJAX_CORPORA", "data")


def _register() -> None:
    for name, corpus in (
        ("cepe_filter", "redpajama"),
        ("cepe_cat", "redpajama"),
        ("slimpajama_upsampled", "slimpajama_upsampled"),
    ):
        config = getattr(corpora, name)(FOLDER)
        register(f"lcjax_{name}", config, str(Path(FOLDER, corpus, TOKENIZER)))
    seqio, _ = import_seqio()
    seqio.MixtureRegistry.add("lcjax_cepe", [("lcjax_cepe_filter", 2.0), ("lcjax_cepe_cat", 1.0)])


_register()
