"""Chat templates render as transformers renders them, and messages can't write control tokens."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.chat_template import SOURCE_CHARS_MAX, ChatTemplate
from gateway.engine.model.errors import ModelError
from gateway.engine.tokenizer import ChatTemplateError, Tokenizer
from tests.reference import HARD_TEXTS

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "blocks and whitespace": """
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content | trim -%}
{%- else -%}
    {%- set system = '' -%}
{%- endif %}
{{ bos_token }}{{ system }}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
[{{ loop.index0 }}] {{ m.content.strip().split('\\n')[-1] }}{{ eos_token }}
        {% if loop.index > 3 %}{% break %}{% endif %}
    {% endfor %}
""",
    "namespace and macro": """
{%- set ns = namespace(count=0, last='') -%}
{%- macro show(m) -%}{{ m['role'] | upper }}: {{ m['content'] }}{%- endmacro -%}
{%- for m in messages -%}
{%- set ns.count = ns.count + 1 -%}{%- set ns.last = m.role -%}{{ show(m) }};
{%- endfor -%}
{{ ns.count }} {{ ns.last }} {{ dict(a=1) | tojson }} {{ undefined_name }}
""",
    "json and html": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|<b>&amp;</b>",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if tools is none and documents is not defined or not documents %}-"
        "{% endif %}"
    ),
    "time": "{{ strftime_now('%Y') }}{{ messages | length }}{{ messages[-1].content[:5] }}",
}
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "  Answer in one word.\n"},
        {"role": "user", "content": "Capital of France?"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi\n\n  there "},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Count to 12:\n 1\n 2"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %} <b>&</b> \u00e9\u4f60 \U0001f600"},
    ],
    [{"role": "user", "content": text} for text in HARD_TEXTS if "<|" not in text],
]


# --- as transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_transformers(
    messages: list[dict[str, str]], ours: Tokenizer, theirs: Any
) -> None:
    expected = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ours.encode_chat(messages) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(
    source: str, messages: list[dict[str, str]], theirs: Any
) -> None:
    expected = theirs.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert ChatTemplate(source, theirs.special_tokens_map).render(messages) == expected


# --- refusals -----------------------------------------------------------------------------------


def test_what_a_template_says_to_the_client_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="Roles must alternate"):
        template.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing() }}",
        "{{ messages[3].role }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_is_a_chat_template_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_template_that_writes_without_end_is_stopped() -> None:
    body = (
        "{% for i in range(90000) %}{% for j in range(90000) %}0123456789{% endfor %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="too long"):
        ChatTemplate(body, {}).render([])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% unknown %}", "{" * (SOURCE_CHARS_MAX + 1)]
)
def test_a_broken_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source, {})


def test_a_model_without_a_template_says_so(theirs: Any) -> None:
    tokenizer = Tokenizer(theirs.backend_tokenizer)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_the_template_of_a_folder_is_found_wherever_it_is_written(
    reference_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(reference_folder / "tokenizer.json")
    named = '[{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]'
    one = '{"chat_template": "one {{ bos_token }}", "bos_token": {"content": "B"}}'
    for file, content, expected in (
        ("tokenizer_config.json", "{}", None),
        ("tokenizer_config.json", f'{{"chat_template": {named}}}', "list"),
        ("tokenizer_config.json", one, "one B"),
        ("chat_template.json", '{"chat_template": "json"}', "json"),
        ("chat_template.jinja", "jinja", "jinja"),
    ):
        (tmp_path / file).write_text(content)
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.has_chat_template == (expected is not None)
        if expected is not None:
            assert tokenizer.decode(tokenizer.encode_chat([])) == expected
