"""Chat templates in the style of each family give the text that transformers gives."""

import json

import pytest
from test_tokenizers import backend, tokenizer
from tiny_lm import recorded_template_variables

from lcjax import Conversation, LanguageModel, Sampling
from lcjax.checkpoints.build import ModelSection
from lcjax.checkpoints.chat_template import render_template
from lcjax.checkpoints.tokenizer import check_template_variables
from lcjax.errors import InputError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place, <now>.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}

# Each is written after what the published one does, by hand, and shorter.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
SMOLLM3 = r"""
{%- set enable_thinking = enable_thinking | default(true) -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' -%}
  {%- set instructions = messages[0].content.replace('/no_think', '').rstrip() -%}
{%- endif -%}
<|im_start|>system
Today: {{ strftime_now('%Y') }}. Reasoning: {{ mode }}
{{ instructions | default('You are a helpful assistant.', true) }}
{% if xml_tools or tools %}
{% for tool in (xml_tools or tools) %}
{{ tool.function | tojson(separators=(',', ':'), sort_keys=true) }}
{% endfor %}
{% endif %}
<|im_end|>
{% for message in messages if message.role != 'system' %}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'user' -%}
    {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' -%}
    {% generation %}
    {%- set mode = 'inside' -%}
    {%- if not enable_thinking -%}
      {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}
    {%- else -%}
      {{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
    {%- endif -%}
    {% endgeneration %}
  {%- endif -%}
  {{- mode -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}
{%- endif -%}
"""
GEMMA3 = r"""
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('Invalid content type') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{% if not loop.last %}{{ '<|assistant|>\n' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}"
    "{% endif %}"
)
LLAMA31 = r"""
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nFunctions:\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
SYSTEM = {"role": "system", "content": "Be short. /no_think"}
QUESTION = {"role": "user", "content": " How is the weather in Zürich?\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSunny."}
TALKS = {
    "question": [QUESTION],
    "system": [SYSTEM, QUESTION],
    "turns": [QUESTION, ANSWER, {"role": "user", "content": "And <b>tomorrow</b>?"}],
    "answered": [SYSTEM, QUESTION, ANSWER],
}
TOOL_TALKS = {
    "call": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "result": [
        *(SYSTEM, QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}),
        {"role": "tool", "name": "weather", "content": '{"sky": "blue"}'},
    ],
    "thought": [QUESTION, ANSWER | {"content": "Sunny.", "reasoning_content": "hm"}],
}
DOCUMENTS = [{"title": "Log", "text": "Mara Lind"}, {"title": "Map", "text": "north"}]
GRANITE = (
    "{% for document in documents or [] %}<|doc|>{{ document.title }}\n{{ document['text'] }}\n"
    "{% endfor %}{% if documents is none %}nothing{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>{% endif %}"
)
CASES = [
    *((QWEN3, talk, {}) for talk in TALKS),
    *((QWEN3, talk, {"enable_thinking": False}) for talk in TALKS),
    *((QWEN3, talk, {"tools": [WEATHER]}) for talk in (*TALKS, *TOOL_TALKS)),
    *((SMOLLM3, talk, {}) for talk in TALKS),
    *((SMOLLM3, talk, {"enable_thinking": False}) for talk in TALKS),
    *((SMOLLM3, talk, {"tools": [WEATHER]}) for talk in TALKS),
    *((SMOLLM3, talk, {"xml_tools": [WEATHER]}) for talk in TALKS),
    *((GEMMA3, talk, {}) for talk in TALKS),
    *((OLMO2, talk, {}) for talk in TALKS),
    *((PHI3, talk, {}) for talk in TALKS),
    *((LLAMA31, talk, {}) for talk in (*TALKS, "call", "result")),
    *((LLAMA31, talk, {"tools": [WEATHER]}) for talk in (*TALKS, "call", "result")),
    (LLAMA31, "system", {"builtin_tools": ["code_interpreter", "search"]}),
    (LLAMA31, "system", {"date_string": "1 May 2026"}),
    *((GRANITE, talk, {}) for talk in TALKS),
    *((GRANITE, talk, {"documents": DOCUMENTS}) for talk in TALKS),
]
NAMES = {
    QWEN3: "qwen3", SMOLLM3: "smollm3", GEMMA3: "gemma3", OLMO2: "olmo2", PHI3: "phi3",
    LLAMA31: "llama3.1", GRANITE: "granite",
}  # fmt: skip


def test_every_kind_of_template_is_tested():
    assert {template for template, _, _ in CASES} == set(NAMES)


@pytest.mark.parametrize(
    ("template", "talk", "variables"),
    CASES,
    ids=[f"{NAMES[t]}-{talk}-{'-'.join(v) or 'plain'}" for t, talk, v in CASES],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_template_of_a_family_gives_the_text_of_transformers(template, talk, variables, prompt):
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer(chat_template=template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend(), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    theirs.chat_template = template
    messages = (TALKS | TOOL_TALKS)[talk]
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, **variables
    )
    assert ours.render_chat(messages, prompt, **variables) == expected
    assert len(expected) > 20


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("separators=(',', ':')", {"separators": (",", ":")}),
        ("sort_keys=true", {"sort_keys": True}),
        ("indent=2, sort_keys=true", {"indent": 2, "sort_keys": True}),
        ("ensure_ascii=true", {"ensure_ascii": True}),
        ("true, 1, (';', '='), true", {"ensure_ascii": True, "indent": 1, "separators": (";", "="),
                                       "sort_keys": True}),
    ],
)  # fmt: skip
def test_options_of_tojson_are_those_of_json_dumps(arguments, options):
    value = {"b": [1, {"é": None}], "a": "<x>"}
    text = render_template(f"{{{{ value | tojson({arguments}) }}}}", [], value=value).text
    assert text == json.dumps(value, **{"ensure_ascii": False} | options)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (["tools"], "must map names of variables to values"),
        ("thinking", "must map names"),
        ({"messages": []}, "messages is no variable"),
        ({"add_generation_prompt": False}, "add_generation_prompt is no variable"),
    ],
)
def test_variables_that_no_template_may_get_are_refused(variables, words):
    with pytest.raises(InputError, match=f"chat_template_kwargs.*{words}"):
        check_template_variables(variables)


def test_a_variable_may_have_any_other_name():
    names = {"self": 1, "template": 2, "value": 3, "bos_token": "<b>"}
    ours = tokenizer(chat_template="{{ template }}{{ value }}{{ bos_token }}")
    assert ours.render_chat([QUESTION], **check_template_variables(names)) == "23<b>"


def test_a_message_without_text_must_call_a_tool():
    ours = tokenizer(chat_template=QWEN3)
    assert "<tool_call>" in ours.render_chat(
        [QUESTION, {"role": "assistant", "tool_calls": [CALL]}]
    )
    for message in ({"role": "assistant", "content": None}, {"role": "user"}, {"content": "x"}):
        with pytest.raises(InputError, match="must be a question, or a list of messages"):
            ours.render_chat([message])


@pytest.mark.slow
def test_chat_and_conversations_hand_variables_to_the_template(monkeypatch):
    lm = LanguageModel.load(ModelSection(preset="tiny"))
    seen = recorded_template_variables(monkeypatch, lm.tokenizer)
    options = {"enable_thinking": False, "tools": [WEATHER]}
    lm.chat("hi", Sampling(max_new_tokens=1), chat_template_kwargs=options)
    Conversation(lm, chat_template_kwargs=options).say("hi", Sampling(max_new_tokens=1))
    assert seen == [options, options]
    with pytest.raises(InputError, match="chat_template_kwargs"):
        lm.chat("hi", chat_template_kwargs={"messages": []})
