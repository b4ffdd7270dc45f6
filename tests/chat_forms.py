"""Chat templates in the form of published ones, and tokenizers of each kind."""

import functools
import io
import json

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from lcjax.checkpoints.tokenizer import JsonTokenizer, SentencePieceTokenizer, Specials

_TEXT = (
    "The ferry leaves the pier at seven in the morning and returns at nine. Seven boats were"
    " counted on Monday, 12 on Tuesday. user assistant system [INST] When? [/INST] <|x|> Naïve."
)
SPECIAL = (
    "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|end|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
)  # fmt: skip
FORMS = {
    "llama2": (
        "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content +"
        " '\n<</SYS>>\n\n' %}{% set turns = messages[1:] %}{% else %}{% set system = '' %}"
        "{% set turns = messages %}{% endif %}{% for m in turns %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() }} [/INST]"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|end|>\n\n"
        "{{ m.content | trim }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|end|>\n\n{% endif %}"
    ),
    "chatml": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}"
        "</call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "qwen3": (
        "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% else %}{% set answer = m.content.split('</think>')[-1] %}"
        "{% if loop.last %}<|im_start|>assistant\n<think>\n"
        "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content"
        " else '' }}\n</think>\n\n{{ answer.lstrip() }}<|im_end|>\n{% else %}"
        "<|im_start|>assistant\n{{ answer.lstrip() }}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "mistral1": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ m.content + eos_token + ' ' }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral3": (
        "{{ bos_token }}{% set system = messages[0].content if messages[0].role == 'system' %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.index0 == (messages | selectattr('role', 'equalto', 'user') | list | length)"
        " and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}\n"
        "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
        "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    ),
    "harmony": (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
        "<|end|>{{ 'final' }}{% endif %}<|x|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "generation": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
        "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
_ENDS = {"gemma": "<end_of_turn>", "phi3": "<|end|>"} | dict.fromkeys(
    ("llama3", "chatml", "qwen3", "harmony", "generation"), "<|im_end|>"
)


def _byte_level():
    """BPE of bytes, as in GPT-2, Llama 3 and Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([_TEXT], trainer)
    return made


def _byte_fallback(normalizer=None, pre_tokenizer=None):
    """BPE with bytes for unknown characters, as Llama 2 in transformers."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    trained.train_from_iterator([_TEXT], trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    bpe = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(bpe)
    if normalizer:
        made.normalizer = normalizer
    if pre_tokenizer:
        made.pre_tokenizer = pre_tokenizer
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


def _unigram():
    """A Unigram model whose vocabulary has the special tokens, as T5."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([_TEXT], trainer)
    made.decoder = decoders.Metaspace()
    return made


def _sentencepiece():
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.split(". ")), model_writer=writer, model_type="bpe",
        vocab_size=360, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return writer.getvalue()


KINDS = {
    "byte level": _byte_level,
    "prepended blank": lambda: _byte_fallback(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "metaspace first": lambda: _byte_fallback(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "metaspace always": lambda: _byte_fallback(
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "unigram": _unigram,
    "sentencepiece": _sentencepiece,
}


@functools.cache
def _made(kind):
    return KINDS[kind]()


@functools.cache
def chat_tokenizer(kind, form):
    """A tokenizer of one of `KINDS` with the template of one of `FORMS`."""
    made, added = _made(kind), {}
    if kind == "sentencepiece":
        added = {text: 360 + i for i, text in enumerate(SPECIAL[3:])}
        ids = {"<unk>": 0, "<s>": 1, "</s>": 2} | added
    else:
        made = Tokenizer.from_str(made.to_str())
        tokens = [
            AddedToken(text, normalized=False, rstrip=form == "phi3" and text[1] == "|")
            for text in SPECIAL
        ]
        made.add_special_tokens(tokens)
        ids = made.get_vocab(with_added_tokens=True)
    specials = Specials(
        bos_id=ids["<s>"],
        eos_ids=(ids[_ENDS.get(form, "</s>")],),
        unk_id=ids["<unk>"],
        chat_template=FORMS[form],
    )
    if kind == "sentencepiece":
        tokens = {i: {"content": text, "special": True} for text, i in added.items()}
        return SentencePieceTokenizer(made, specials, added=tokens)
    return JsonTokenizer(made, specials)
