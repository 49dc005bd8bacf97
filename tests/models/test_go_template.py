"""Ollama's templates in Jinja: what the worker's own renderer makes of them is what Ollama would send."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import InvalidRequest
from swarmllm.models.go_template import translate
from swarmllm_workers.decode.template import ChatTemplate

CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
MESSAGES = """{{- range .Messages }}
{{- if eq .Role "user" }}[INST] {{ .Content }} [/INST]
{{- else if eq .Role "system" }}<<{{ .Content }}>>
{{- else }} {{ .Content }}</s>
{{- end }}
{{- end }}"""
TALK = [
    {"role": "system", "content": "Be {{ brief }}."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": "1."},
    {"role": "user", "content": 'Gr\u00fc\u00dfe \U0001f600 "2"?'},
]


def rendered(template: str, messages: list[dict[str, object]]) -> str:
    return ChatTemplate(translate(template), bos_text="", eos_text="").render(messages, None)


def test_the_older_form_is_applied_to_each_turn_and_ends_where_the_answer_begins() -> None:
    assert rendered(CHATML, TALK) == (
        "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n1.<|im_end|>\n"
        '<|im_start|>user\nGr\u00fc\u00dfe \U0001f600 "2"?<|im_end|>\n<|im_start|>assistant\n'
    )
    assert rendered(CHATML, TALK[1:2]) == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered("{{ .Prompt }}", TALK[1:2]) == "1?"
    assert rendered("{{ .System }} {{ .Prompt }}\n", TALK[:2]) == "Be {{ brief }}. 1?\n"


def test_a_range_over_messages_is_a_loop() -> None:
    assert rendered(MESSAGES, TALK) == (
        '<<Be {{ brief }}.>>[INST] 1? [/INST] 1.</s>[INST] Gr\u00fc\u00dfe \U0001f600 "2"? [/INST]'
    )
    with_system = "{{ if .System }}S:{{ .System }}|{{ end }}{{ range .Messages }}"
    with_system += '{{ if eq .Role "user" }}{{ .Content }};{{ end }}{{ end }}A:'
    assert rendered(with_system, TALK[:2]) == "S:Be {{ brief }}.|1?;A:"


def test_text_that_is_jinja_stays_text() -> None:
    odd = '{% if %} {# no #} \\n "quoted" \t end'
    assert rendered(odd + "{{ .Prompt }}", TALK[1:2]) == odd + "1?"


def test_comments_and_trimmed_spaces_are_as_in_go() -> None:
    assert rendered("a \n {{- /* why */ -}} \n b{{ .Prompt }}", TALK[1:2]) == "ab1?"


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ range $i, $_ := .Messages }}{{ end }}", r"range \$i"),
        ("{{ if .Tools }}{{ end }}", r"\.Tools"),
        ("{{ .Content }}", r"\.Content"),
        ("{{ range .Messages }}{{ .System }}{{ end }}", r"\.System"),
        ("{{ if .System }}", "without {{ end }}"),
        ("{{ end }}", "without an if"),
        ("{{ if .System }}{{ .Response }}{{ end }}", "inside of an if"),
        ("{{ .Response }}{{ .Response }}", "twice"),
        ("{{ range .Messages }}{{ end }}{{ .Prompt }}", "beside .Messages"),
        ("{{ if .System }}{{ else }}{{ else }}{{ end }}", "twice"),
        ("{{ json .Prompt }}", "json"),
        ("{{ .Prompt", "without }}"),
        ("{{ if .System }}" * 40 + "{{ end }}" * 40, "more than 32"),
    ],
)
def test_what_has_no_certain_meaning_is_refused_by_name(template: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        translate(template)


PIECES = [
    *("{{ ", " }}", "{{-", "-}}", "if .System", "if .Prompt", "else", "end"),
    *(".Response", "range .Messages", "x", '"', "{%", "%}"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join))
def test_what_is_translated_compiles(template: str) -> None:
    with suppress(InvalidRequest):
        rendered(template, TALK)
