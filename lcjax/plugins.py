"""Imports the packages that register types with sections of a training's config.

`lcjax.training` does not know its applications: a section whose types they define imports this
module when a config, or `--help`, first needs the types.
"""

import lcjax.retrieval  # noqa: F401  the types of the section `retriever`
