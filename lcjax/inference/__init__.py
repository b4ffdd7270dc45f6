"""The engine behind `lcjax.lm`: prompts and contexts are read, texts are written and scored."""
