"""The `openai` client against a real daemon: chats, completions and embeddings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from daemon_process import DaemonProcess
from openai_asking import QUESTION, ask, text_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

ANYTHING = {"typical_p": 1.0}
"""The guide's preset leaves out what is not typical of its answers."""


def counted(answer: Any) -> tuple[int, int]:
    """What was guessed or cached of it may differ between two runs."""
    return answer.usage.prompt_tokens, answer.usage.completion_tokens


def test_models_are_found(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["guide"]
    assert ai.models.retrieve("guide").owned_by == "swarmllm"


def test_a_stream_says_the_same_as_a_whole_answer(ai: openai.OpenAI) -> None:
    whole = ask(ai)
    chunks = list(ask(ai, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == text_of(whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert counted(chunks[-1]) == counted(whole)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_text_is_completed_streamed_or_not(ai: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "guide",
        "prompt": "A layer range is",
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = ai.completions.create(**options)
    chunks = list(ai.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert counted(chunks[-1]) == counted(whole)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12
    assert ai.completions.create(**options, echo=True).choices[0].text == (
        "A layer range is" + whole.choices[0].text
    )


def test_several_prompts_and_token_ids_are_completed_in_one_request(
    ai: openai.OpenAI, node: DaemonProcess
) -> None:
    content = {"content": "A layer range is", "add_special": True}
    ids = node.http.post("/tokenize", json=content).json()["tokens"]
    texts = ["A layer range is", "A swarm is"]
    options: dict[str, Any] = {"model": "guide", "temperature": 0, "max_tokens": 8}
    alone = [ai.completions.create(prompt=text, **options) for text in texts]
    both = ai.completions.create(prompt=texts, **options)
    said = [each.choices[0].text for each in alone]
    assert [choice.text for choice in both.choices] == said
    assert both.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert ai.completions.create(prompt=ids, **options).choices[0].text == said[0]
    with pytest.raises(openai.BadRequestError, match="Token ids of guide lie in"):
        ai.completions.create(prompt=[10**6], **options)


def test_several_choices_are_told_apart_and_the_prompt_is_counted_once(ai: openai.OpenAI) -> None:
    alone = ask(ai, max_tokens=12)
    several = ask(ai, max_tokens=12, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert {choice.message.content for choice in several.choices} == {text_of(alone)}
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    assert several.usage.completion_tokens == 3 * alone.usage.completion_tokens
    drawn = ask(ai, temperature=2, seed=5, max_tokens=12, n=3, extra_body=ANYTHING).choices
    assert len({choice.message.content for choice in drawn}) == 3
    texts = ["", "", ""]
    for chunk in ask(ai, max_tokens=12, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [text_of(alone)] * 3


def test_log_probabilities_are_told_in_both_shapes(ai: openai.OpenAI) -> None:
    answer = ask(ai, max_tokens=5, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == text_of(answer)
    for each in content:
        assert each.logprob == max(top.logprob for top in each.top_logprobs)  # it was greedy
        assert len(each.top_logprobs) == 3
        assert bytes(each.bytes).decode() == each.token
    chunks = ask(
        ai, max_tokens=5, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}, stream=True
    )
    streamed = [e for chunk in chunks if (told := chunk.choices[0].logprobs) for e in told.content or ()]
    assert streamed == content
    old = ai.completions.create(model="guide", prompt="A layer", max_tokens=4, temperature=0, logprobs=2)
    told = old.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or ()) == old.choices[0].text
    assert [len(each) for each in told.top_logprobs or ()] == [2] * len(told.tokens or ())


def test_max_tokens_is_kept_and_named_as_the_reason(ai: openai.OpenAI) -> None:
    answer = ask(ai, max_tokens=None, max_completion_tokens=3, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_without_max_tokens_the_answer_fills_the_context(ai: openai.OpenAI) -> None:
    answer = ask(ai, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 2048


def test_a_stop_string_ends_the_text_before_it(ai: openai.OpenAI) -> None:
    text = text_of(ask(ai))
    stop = text[len(text) // 2 :][:6]
    answer = ask(ai, stop=[stop, "never said"])
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(answer) == text[: text.index(stop)]


def test_a_seed_fixes_what_is_sampled(ai: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "temperature": 2,
        "messages": [{"role": "user", "content": "Zebra, quilt, ..."}],
        "seed": 11,
        "extra_body": ANYTHING,
    }
    assert text_of(ask(ai, **options)) == text_of(ask(ai, **options))
    assert text_of(ask(ai, **options)) != text_of(ask(ai, **options | {"seed": 12}))


def test_requests_at_the_same_time_do_not_disturb_each_other(ai: openai.OpenAI) -> None:
    questions = ["What is a node?", "What is a worker?", "What is a hop?", "What is a slot?", "hello"]

    def answer(question: str) -> str:
        return text_of(ask(ai, messages=[{"role": "user", "content": question}]))

    alone = [answer(question) for question in questions]
    with ThreadPoolExecutor(len(questions)) as threads:
        together = list(threads.map(answer, questions))
    assert together == alone


def test_more_requests_than_turns_are_queued_not_refused(ai: openai.OpenAI) -> None:
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: text_of(ask(ai, max_tokens=5)), range(20)))
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"n": 300}, openai.BadRequestError, "n"),
        ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "best_of"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, openai.BadRequestError, "messages"),
    ],
)
def test_errors_are_of_the_clients_own_kinds(
    ai: openai.OpenAI, options: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            ask(ai, stream=stream, **options)
        assert caught.value.param == param
        assert caught.value.request_id


def test_a_picture_that_is_none_is_the_clients_mistake(ai: openai.OpenAI) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, messages=[{"role": "user", "content": [picture]}])
    assert caught.value.param == "messages[0].content[0].image_url.url"


def test_the_next_turn_of_a_session_computes_only_what_is_new(ai: openai.OpenAI, node: DaemonProcess) -> None:
    def cached_in_all() -> float:
        lines = node.http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("swarmllm_cached_prompt_tokens_total{")
        )

    before = cached_in_all()
    first = ask(ai, max_tokens=60, extra_body={"session_id": "talk"})
    turns = [*QUESTION, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Why?"}]
    second = ask(ai, messages=turns, max_tokens=3, prompt_cache_key="talk")
    fresh = ask(ai, messages=turns, max_tokens=3)
    told = second.usage.prompt_tokens_details.cached_tokens
    assert told > first.usage.prompt_tokens
    assert text_of(second) == text_of(fresh)
    assert cached_in_all() >= before + told


TEXTS = ["A pipeline is an ordered list of stages.", "A worker is a process.", "Zebra, quilt, ..."]


def embed(ai: openai.OpenAI, value: Any, **options: Any) -> list[list[float]]:
    return [item.embedding for item in ai.embeddings.create(model="guide", input=value, **options).data]


def test_vectors_of_texts_and_of_their_tokens_are_the_same(ai: openai.OpenAI, node: DaemonProcess) -> None:
    answer = ai.embeddings.create(model="guide", input=TEXTS)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert {len(vector) for vector in vectors} == {256}
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
    as_floats = embed(ai, TEXTS, encoding_format="float")  # the client asks for base64 by itself
    tokens = [node.http.post("/tokenize", json={"content": text}).json()["tokens"] for text in TEXTS]
    for other in (as_floats, embed(ai, tokens), [embed(ai, text)[0] for text in TEXTS]):
        for mine, theirs in zip(vectors, other, strict=True):
            assert sum(a * b for a, b in zip(mine, theirs, strict=True)) > 0.9999
    assert embed(ai, tokens[0])[0] == embed(ai, [tokens[0]])[0]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))
    assert embed(ai, TEXTS[0], extra_body={"pooling": "last"})[0] != vectors[0]
    assert embed(ai, TEXTS[0], dimensions=256)[0] == embed(ai, TEXTS[0])[0]
    raw = ai.embeddings.with_raw_response.create(model="guide", input="x")
    assert raw.headers["x-swarm-route"] == f"local 0:12@{node.node_id}"
    assert "prefill;dur=" in raw.headers["server-timing"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": ["x", {}]}, "input[1]"),
        ({"input": [[5000]]}, "input"),
        ({"input": "word " * 4000}, "input"),
        ({"input": ["x", "word " * 4000]}, "input[1]"),
        ({"dimensions": 64}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"extra_body": {"pooling": "first"}}, "pooling"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    ai: openai.OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.embeddings.create(**({"model": "guide", "input": "x"} | options))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("chat/completions", "messages", [{"role": "user", "content": "x" * 3000}]),
        ("completions", "prompt", "x" * 3000),
        ("responses", "input", "x" * 3000),
        ("embeddings", "input", "x" * 3000),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_by_its_name(
    node: DaemonProcess, path: str, field: str, prompt: object
) -> None:
    refused = node.http.post(f"/v1/{path}", json={"model": "guide", field: prompt})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith(field)
