"""The command `python -m lcjax.convert`; `lcjax.checkpoints` reads and writes checkpoints."""
