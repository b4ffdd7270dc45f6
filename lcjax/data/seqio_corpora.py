"""Registers the mixtures of the papers with seqio when it is imported.

    data:
      sources:
      - {type: seqio, task: lcjax_cepe, module: lcjax.data.seqio_corpora,
         converter: chunks, context: context}

The environment variable LCJAX_CORPORA names the folder of the tokenised corpora; default: data.
"""

import os

from lcjax.data.seqio_tasks import register_papers

register_papers(os.environ.get("LCJAX_CORPORA", "data"))
