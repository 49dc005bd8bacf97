"""The corpus: the same from the same seed, wide, and with nothing of the evaluation in it."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.guide import corpus
from swarmllm.guide.corpus import frames, patterns, slots, topics_chat
from swarmllm.guide.corpus.more_asks import MORE_ASKS
from swarmllm.guide.corpus.talk import CHAT_TOPICS, TOPICS


def questions(samples: list[corpus.Sample]) -> set[str]:
    """Normalised user texts of single-turn conversations without tools."""
    return {
        " ".join(sample.messages[-2]["content"].casefold().rstrip("?!. ").split())
        for sample in samples
        if len(sample.messages) == 2 and not sample.tools
    }


def test_the_same_seed_gives_the_same_corpus_and_another_seed_another() -> None:
    assert corpus.digest(300, seed=5) == corpus.digest(300, seed=5)
    assert corpus.digest(300, seed=5) != corpus.digest(300, seed=6)
    assert [s.key() for s in corpus.heldout(2)] == [s.key() for s in corpus.heldout(2)]


@pytest.mark.parametrize("mix", [corpus.WIDE_MIX, corpus.HARD_MIX, corpus.PRACTICE_MIX])
def test_a_mix_shares_out_everything(mix: corpus.Mix) -> None:
    assert sum(mix) == pytest.approx(1.0)


def test_echoes_repeat_the_words_of_the_question() -> None:
    echoes = [sample for sample in corpus.build(200, seed=1, echo_share=0.5) if sample.category == "echo"]
    assert 50 < len(echoes) < 150
    for sample in echoes:
        asked, said = sample.messages
        assert asked["content"].endswith(said["content"])


def test_there_are_many_topics_and_each_can_be_asked_about() -> None:
    assert len(TOPICS) >= 120
    assert len({topic.key for topic in TOPICS}) == len(TOPICS)
    for topic in TOPICS:
        assert topic.terms or topic.train_asks, topic.key
        assert topic.answer
        assert topic.short


def test_no_two_subjects_share_an_answer() -> None:
    answers = [topic.answer for topic in TOPICS]
    assert len(set(answers)) == len(answers)


@pytest.mark.slow
def test_no_heldout_question_occurs_in_training() -> None:
    heldout = questions(corpus.heldout())
    assert len(heldout) > 500
    for mix in (corpus.WIDE_MIX, corpus.HARD_MIX, corpus.PRACTICE_MIX):
        assert not heldout & questions(list(corpus.build(12_000, seed=11, mix=mix)))


def test_frames_patterns_and_values_are_split_for_good() -> None:
    for kind, heldout in frames.HELDOUT_FOLLOW_UPS.items():
        assert not set(heldout) & set(frames.FOLLOW_UPS[kind]), kind
    assert not set(frames.HELDOUT_DEFINITIONS) & set(frames.DEFINITIONS)
    assert not set(frames.HELDOUT_SHORTS) & set(frames.SHORTS)
    assert not set(frames.HELDOUT_SHORT_WRAPPERS) & set(frames.SHORT_WRAPPERS)
    assert not set(patterns.HELDOUT_WRAPPERS) & set(patterns.WRAPPERS)
    assert not set(topics_chat.OFF_HELDOUT_PATTERNS) & set(topics_chat.OFF_PATTERNS)
    assert not set(slots.HELDOUT_CITIES) & set(slots.CITIES)
    assert not set(slots.HELDOUT_PEOPLE) & set(slots.PEOPLE)
    for kind, values in topics_chat.OFF_HELDOUT_SLOTS.items():
        assert not set(values) & set(topics_chat.OFF_SLOTS[kind]), kind


@given(st.integers(0, 2**32))
def test_training_values_are_never_heldout_values(seed: int) -> None:
    rng = random.Random(seed)
    assert slots.city(rng).title() not in slots.HELDOUT_CITIES
    assert slots.person(rng).title() not in slots.HELDOUT_PEOPLE
    number, heldout_number = slots.number(rng), slots.number(rng, heldout=True)
    assert number <= 9 or number % 17 != 3
    assert heldout_number > 9
    assert heldout_number % 17 == 3
    start, end = slots.layer_range(rng)
    assert 0 <= start < end
    assert (7 * start + end) % 11 != 5


def test_tool_calls_copy_their_arguments_from_the_question() -> None:
    n_calls = 0
    for sample in corpus.build(2000, seed=3, mix=corpus.PRACTICE_MIX):
        names = {tool["function"]["name"] for tool in sample.tools}
        for asked, said in zip(sample.messages, sample.messages[1:], strict=False):
            for call in said.get("tool_calls", ()):
                n_calls += 1
                assert call["function"]["name"] in names
                for value in json.loads(call["function"]["arguments"]).values():
                    for part in str(value).split(":"):
                        assert part in asked["content"]
    assert n_calls > 100


def test_small_talk_is_never_a_subject_to_come_back_to() -> None:
    for topic in CHAT_TOPICS:
        assert not (topic.why)
        assert not (topic.more)
        assert not (topic.command)
        assert not (topic.port)


def test_additional_questions_belong_to_topics_and_none_is_held_out() -> None:
    topics = {topic.key: topic for topic in TOPICS}
    for key, asks in MORE_ASKS.items():
        assert not set(asks) & set(topics[key].heldout_asks), key
