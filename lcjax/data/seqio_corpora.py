"""Registers the training mixtures of the papers with seqio when it is imported.

    data:
      sources:
      - {type: seqio, task: lcjax_cepe, module: lcjax.data.seqio_corpora,
         converter: chunks, context: context}

- `lcjax_cepe_filter`, `lcjax_cepe_cat`: the two kinds of rows of configs/data/cepe_mixture.yaml,
  inside long documents and across all; `lcjax_cepe`: both, 2:1.
- `lcjax_slimpajama_upsampled`: rows of 32,768 tokens of SlimPajama, up-sampled by length (Fu et al.
  2024, arXiv 2402.10171, sec. 3), as in the LCEG study (arXiv 2409.12181): BOS before every
  document, no EOS, no document mask.

The environment variable LCJAX_CORPORA names the folder (default: data) that holds the folders
`redpajama` and `slimpajama_upsampled` of `python -m lcjax.data prepare`. No file of them is opened
before the first row is read.
"""

import os
from dataclasses import replace
from pathlib import Path

from lcjax.config.decode import read_yaml, section
from lcjax.data.data_config import DataConfig, TokenSource
from lcjax.data.prepare import TOKENIZER
from lcjax.data.seqio_source import import_seqio
from lcjax.data.seqio_tasks import register


def _register_papers(folder: Path) -> None:
    cepe = section(DataConfig, read_yaml("lcjax:data/cepe_mixture"), "data")
    inside = [source for source in cepe.sources if source.pack == "windows"]
    across = [source for source in cepe.sources if source.pack is None]
    for name, sources in (("lcjax_cepe_filter", inside), ("lcjax_cepe_cat", across)):
        sources = [replace(source, path=str(folder / "redpajama")) for source in sources]
        config = replace(cepe, sources=sources)
        register(name, config, str(folder / "redpajama" / TOKENIZER))
    seqio, _ = import_seqio()
    seqio.MixtureRegistry.add("lcjax_cepe", [("lcjax_cepe_filter", 2.0), ("lcjax_cepe_cat", 1.0)])
    corpus = folder / "slimpajama_upsampled"
    slimpajama = DataConfig(
        sources=[TokenSource(str(corpus), rows=True)],
        length=32768,
        document_mask=False,
        add_bos=True,
        add_eos=False,
    )
    register("lcjax_slimpajama_upsampled", slimpajama, str(corpus / TOKENIZER))


_register_papers(Path(os.environ.get("LCJAX_CORPORA", "data")))
