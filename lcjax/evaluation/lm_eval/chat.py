"""Conversations of the harness in a model's own format."""

from collections.abc import Sequence

from lcjax.checkpoints.tokenizer import Message, Tokenizer
from lcjax.errors import InputError


def conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True
) -> str:
    """The text of a conversation; without the generation prompt its last message stays open.

    As `HFLM.apply_chat_template`: a template that knows no system is used without one.
    """
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt)
    except InputError:
        without = [message for message in messages if message["role"] != "system"]
        if len(without) == len(messages):
            raise
        text = tokenizer.render_chat(without, add_generation_prompt)
    if add_generation_prompt:
        return text
    last = messages[-1]["content"].strip()
    return text[: text.rindex(last) + len(last)]
