"""An OpenAI-compatible server of one model: `python -m lcjax.serve --model PATH`.

`protocol` converts JSON bodies to token ids and generated tokens to JSON, `engine` has the single
thread that runs the model, `contexts` the texts that requests name by id, and `app` the HTTP
routes.
"""
