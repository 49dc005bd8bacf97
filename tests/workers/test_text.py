"""Tokens, pieces, stop strings and chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmllm_proto.ipc import Effort, Sampling
from swarmllm_proto.text_stream import TextStream
from swarmllm_workers.decode import template as template_module
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.decode.template import ChatTemplate
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

from .conftest import MakeModel
from .factory import N_VOCAB, special
from .test_exactness import GUIDE

USER: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]


def streamed(text: bytes, splits: Sequence[int], stop: Sequence[str] = ()) -> tuple[bytes, int | None]:
    """Everything a TextStream shows of `text`, pushed in pieces that end at `splits`, and what stopped it."""
    stream = TextStream(stop)
    shown = b""
    bounds = [0, *sorted(at % (len(text) + 1) for at in splits), len(text)]
    for start, end in pairwise(bounds):
        part = stream.push(text[start:end])
        part.decode()  # never half a character
        shown += part
    return shown + stream.flush(), stream.stopped_by


@given(st.text(), st.lists(st.integers(0, 200), max_size=12))
def test_text_without_stop_strings_comes_through_unchanged(text: str, splits: list[int]) -> None:
    assert streamed(text.encode(), splits) == (text.encode(), None)


@given(
    st.text("ab§<", max_size=40),
    st.lists(st.text("ab§<", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 100), max_size=20),
)
@example("aab", ["ab"], [1, 2])
def test_stop_string_never_leaks_however_it_is_split(text: str, stop: list[str], splits: list[int]) -> None:
    """What is shown is the text before the first completed stop string. Which one is completed first may
    depend on the pieces where two overlap; none is ever part of what is shown."""
    shown, stopped_by = streamed(text.encode(), splits, stop)
    assert not any(word in shown.decode() for word in stop)
    assert (stopped_by is not None) == any(word in text for word in stop)
    if stopped_by is None:
        assert shown.decode() == text
    else:
        assert text.startswith(shown.decode() + stop[stopped_by])


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    assert streamed(b"a\xff\xc3(\xe2\x82", [2, 3]) == ("a\ufffd\ufffd(\ufffd".encode(), None)


@pytest.fixture(scope="module")
def vocabulary(make_model: MakeModel) -> Vocabulary:
    path = make_model("llama")
    return Vocabulary(Model(path, vocab_only=True), GgufFile(path))


def test_control_tokens_are_hidden_but_marks_of_tool_calls_are_shown(vocabulary: Vocabulary) -> None:
    assert vocabulary.piece(special("<|im_end|>")) == b""
    assert vocabulary.piece(special("<tool_call>")) == b"<tool_call>"
    assert vocabulary.piece(special("<note>")) == b"<note>"
    assert vocabulary.piece(ord("A")) == b"A"
    assert vocabulary.piece(0xE2) == b"\xe2"
    assert vocabulary.piece(N_VOCAB) == vocabulary.piece(-1) == b""
    assert vocabulary.end_tokens == {special("<|im_end|>"), special("<|endoftext|>")}


@given(st.text())
def test_text_survives_tokens_and_pieces(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.tokenize(text, is_rendered=True)
    assert tokens.dtype == np.int32
    hidden = b"".join(vocabulary.piece(int(token)) for token in tokens)
    if "<|" not in text:
        assert hidden == text.encode()


def test_unpaired_surrogate_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(CallError) as caught:
        vocabulary.tokenize("a\ud800", is_rendered=False)
    assert caught.value.kind == "bad_message"


@pytest.mark.slow
def test_tokens_of_the_guide_equal_libllamas(tmp_path: Path) -> None:
    vocabulary = Vocabulary(Model(GUIDE, vocab_only=True), GgufFile(GUIDE))
    reference = llama_cpp.Llama(str(GUIDE), vocab_only=True, verbose=False)
    for text in ("What is a node?", "<|im_start|>user\nHi<|im_end|>\n", "  Grüße, 世界! \n\tdef f(x): …"):
        expected = reference.tokenize(text.encode(), add_bos=True, special=True)
        assert vocabulary.tokenize(text, is_rendered=False).tolist() == expected
    reference.close()


def render(source: str, messages: list[dict[str, object]] | None = None, **fields: object) -> str:
    chosen = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    said = messages if messages is not None else list(USER)
    return chosen.render(said, fields.get("tools"), fields.get("effort"))  # type: ignore[arg-type]


def test_template_sees_what_models_expect() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "[{{ m['role'] }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{{ tools | tojson }}{% if add_generation_prompt %}>{% endif %}"
    )
    tools = [{"name": "ä<b>"}]
    assert render(source, USER + USER, tools=tools) == '<s>[user]Hello</s>[{"name": "ä<b>"}]>'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ messages[0].content.split('l')[0] }}") == "He"


PARTS_ALONE = (
    "{% for m in messages %}{{ m.role }}:{% for line in m['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}|{% endfor %}"
)
PARTS_OR_TEXT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for line in m.content %}"
    "[{{ line.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS_NEVER = "{{ messages[0].content }}{# 'text' #}"


def test_a_template_that_takes_only_parts_gets_the_text_as_one() -> None:
    assert render(PARTS_ALONE) == "user:Hello|"
    assert render(PARTS_ALONE, [*USER, *USER]) == "user:Hello|user:Hello|"


@pytest.mark.parametrize("source", [PARTS_OR_TEXT, PARTS_NEVER])
def test_a_template_that_takes_text_gets_text(source: str) -> None:
    assert render(source) == "Hello"


GPT_OSS = (
    "{%- macro head() %}{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}"
    "{%- endif %}Reasoning: {{ reasoning_effort }}{%- endmacro %}{{ head() }}"
)
QWEN = "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}."
GRANITE = "{%- if thinking %}Think first.{%- else %}Answer.{%- endif %}"

DEEPSEEK_R1 = "{{ 'Answer.</think>'.split('</think>')[0] }}"


@pytest.mark.parametrize(
    ("source", "effort", "rendered"),
    [
        (GPT_OSS, None, "Reasoning: medium"),
        (GPT_OSS, "high", "Reasoning: high"),
        (QWEN, None, "."),
        (QWEN, "none", "<think></think>."),
        (QWEN, "low", "."),
        (GRANITE, None, "Answer."),
        (GRANITE, "minimal", "Think first."),
        ("same", "none", "same"),
        (DEEPSEEK_R1, "low", "Answer."),
    ],
)
def test_templates_learn_how_much_to_think_in_their_own_words(
    source: str, effort: str | None, rendered: str
) -> None:
    assert render(source, effort=effort) == rendered


@pytest.mark.parametrize(
    ("effort", "closing"), [(None, ""), ("medium", ""), ("none", "</think>")], ids=["unsaid", "some", "none"]
)
def test_a_thought_that_the_template_opens_is_closed_where_none_is_wanted(
    effort: Effort | None, closing: str
) -> None:
    source = (
        "{{ messages[0].content.split('</think>')[-1] }}{% if add_generation_prompt %}A:<think>\n{% endif %}"
    )
    asked = [{"role": "user", "content": "Q"}]
    template = ChatTemplate(source, bos_text="", eos_text="")
    assert template.render(asked, None, effort) == f"QA:<think>\n{closing}"
    assert template.render(asked, None, effort, is_to_answer=False) == "Q"


def test_a_template_without_a_word_for_thinking_refuses_to_be_told() -> None:
    with pytest.raises(CallError, match="leave it out") as caught:
        render("same", effort="low")
    assert (caught.value.kind, caught.value.field) == ("bad_template", "reasoning_effort")


def test_arguments_of_tool_calls_are_objects_for_the_template() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, object]] = [{"role": "assistant", "tool_calls": [call]}]
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, messages) == '{"a": 1}'


def test_what_templates_mark_as_generated_is_rendered_as_it_is() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}[{{ message.content }}{% if loop.last %}!{% endif %}]{% endgeneration %}"
        "{% else %}<{{ message.content }}>{% endif %}{% endfor %}"
    )
    messages: list[dict[str, object]] = [*USER, {"role": "assistant", "content": "Hi"}]
    assert render(source, messages) == "<Hello>[Hi!]"
    with pytest.raises(CallError, match="does not compile"):
        render("{% generation %}never ended", messages)


def tool(**fields: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def test_tools_without_a_description_are_rendered() -> None:
    source = "{% for t in tools %}{{ t.function.name + ':' + t.function.description }}{% endfor %}"
    assert render(source, tools=[tool()]) == "f:"
    assert render(source, tools=[tool(description="d")]) == "f:d"
    described = (
        "{% for name, p in tools[0].function.parameters.properties.items() %}"
        "{{ name + p.description }}{% endfor %}"
    )
    assert render(described, tools=[tool()]) == "a"
    # A template that needs none sees none.
    assert "description" not in render("{{ tools | tojson }}", tools=[tool()])
    assert render("{% for t in tools %}x{% endfor %}.") == "."


def test_the_date_is_there_for_templates_that_need_it() -> None:
    default = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    assert render(default + "{{ '' + date_string }}") == "26 Jul 2024"
    assert len(render("{{ '' + date_string }}")) == len("26 Jul 2024")


def test_firefunctions_names_are_there() -> None:
    source = "{{ '' + functions }}|{{ 'Today is ' + datetime }}"
    functions, _, date = render(source, tools=[tool(description="d")]).partition("|")
    assert '"name": "f"' in functions
    assert date.startswith("Today is ")
    assert render(source).startswith("|Today is ")


def test_model_without_template_speaks_chatml() -> None:
    messages: list[dict[str, object]] = [{"role": "system", "content": "S"}, *USER]
    assert render("", messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "compile"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' * 10**9 }}", "repeated"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{{ '%0999999999d' % 1 }}", "not supported"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "longer"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
    ],
)
def test_template_that_fails_or_attacks_is_refused(source: str, said: str) -> None:
    with pytest.raises(CallError, match=said) as caught:
        render(source)
    assert caught.value.kind == "bad_template"


@pytest.mark.slow
def test_template_is_bounded_in_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    doubled = "{% set n = namespace(s='a') %}" + "{% set n.s = n.s ~ n.s %}" * 40 + "{{ n.s | length }}"
    # Filling the memory takes a while on a busy machine.
    monkeypatch.setattr(template_module, "RENDER_S", 120.0)
    with pytest.raises(CallError, match="MemoryError"):
        render(doubled)
    monkeypatch.setattr(template_module, "RENDER_S", 0.2)
    with pytest.raises(CallError, match=r"0\.2 s"):
        render(loops)


def logits_for(token: int) -> np.ndarray:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[token] = 10.0
    return logits


def decoded(
    vocabulary: Vocabulary, sampling: Sampling, tokens: Sequence[int]
) -> list[tuple[bytes, str | None]]:
    decoding = Decoding(vocabulary, sampling)
    results = [decoding.decode(logits_for(token), index) for index, token in enumerate(tokens)]
    return [(result.text, result.finish_reason) for result in results]


def test_generation_ends_at_stop_strings_end_tokens_and_the_limit(vocabulary: Vocabulary) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 4}
    end = special("<|im_end|>")
    text = list(b"abcd")
    assert decoded(vocabulary, Sampling(**greedy), text)[-1] == (b"d", "length")  # type: ignore[arg-type]
    assert decoded(vocabulary, Sampling(**greedy), [97, end])[-1] == (b"", "stop")  # type: ignore[arg-type]
    ignoring = Sampling(**greedy, ignore_eos=True)  # type: ignore[arg-type]
    assert decoded(vocabulary, ignoring, [97, end])[-1] == (b"", None)
    stopping = Sampling(**greedy, stop=("bc",))  # type: ignore[arg-type]
    assert decoded(vocabulary, stopping, text[:3]) == [(b"a", None), (b"", None), (b"", "stop")]
    assert decoded(vocabulary, stopping, [97, 98, end])[-1] == (b"b", "stop")


@pytest.mark.parametrize(
    ("tokens", "finish", "stopped_by"),
    [
        (list(b"abc"), "stop", 1),
        (list(b"abcd"), "stop", 1),
        ([97, 98, special("<|im_end|>")], "stop", None),
        (list(b"abzz"), "length", None),
    ],
    ids=["a stop string", "one at the limit", "the model's own end", "the limit"],
)
def test_a_stop_string_that_ended_it_is_told_apart_from_other_ends(
    vocabulary: Vocabulary, tokens: list[int], finish: str, stopped_by: int | None
) -> None:
    stop = ("bd", "bc" if len(tokens) == 3 else "cd", "ab!")
    decoding = Decoding(vocabulary, Sampling(temperature=0.0, max_tokens=4, stop=stop))
    results = [decoding.decode(logits_for(token), index) for index, token in enumerate(tokens)]
    assert (results[-1].finish_reason, results[-1].stopped_by) == (finish, stopped_by)
    assert {result.stopped_by for result in results[:-1]} == {None}


def test_repeated_step_gives_the_same_token_and_text(vocabulary: Vocabulary) -> None:
    decoding = Decoding(vocabulary, Sampling(temperature=0.0, stop=("zz",), ignore_eos=True))
    for index, token in enumerate(b"az"):
        decoding.decode(logits_for(token), index)
    assert decoding.decode(logits_for(ord("b")), 2).text == b"zb"
    assert decoding.decode(logits_for(ord("b")), 2).text == b"zb"
    assert decoding.decode(logits_for(ord("z")), 1).text == b""
    assert decoding.n_generated == 2
    with pytest.raises(CallError) as caught:
        decoding.decode(logits_for(97), 4)
    assert caught.value.kind == "position_gap"
