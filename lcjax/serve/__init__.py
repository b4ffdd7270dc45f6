"""An OpenAI-compatible server of one model: `python -m lcjax.serve --model PATH`.

`protocol` turns JSON bodies into token ids and generated tokens into JSON, `engine` has the one
thread that runs the model, `contexts` the texts that requests read by id, `app` the HTTP routes.
"""
