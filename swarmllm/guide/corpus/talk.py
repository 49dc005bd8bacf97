"""Conversations without tools: single questions, follow-ups that need the context, and refusals."""

from __future__ import annotations

import random

from . import topics_chat, topics_engine, topics_scheduling, topics_swarm, topics_usage, topics_words
from .frames import (
    DEFINITIONS,
    FOLLOW_UPS,
    HELDOUT_DEFINITIONS,
    HELDOUT_FOLLOW_UPS,
    HELDOUT_SHORT_WRAPPERS,
    HELDOUT_SHORTS,
    SHORT_WRAPPERS,
    SHORTS,
    SYSTEM_PROMPTS,
    UNKNOWN,
)
from .patterns import HELDOUT_WRAPPERS, WRAPPERS, dress, expand, fill, wrap
from .sample import Message, Sample, assistant, user
from .slots import invented, person
from .topic import Topic

CHAT_TOPICS = topics_chat.TOPICS
SUBJECT_TOPICS: tuple[Topic, ...] = (
    topics_words.TOPICS
    + topics_swarm.TOPICS
    + topics_engine.TOPICS
    + topics_scheduling.TOPICS
    + topics_usage.TOPICS
)
TOPICS: tuple[Topic, ...] = SUBJECT_TOPICS + CHAT_TOPICS
TERMED_TOPICS = tuple(topic for topic in SUBJECT_TOPICS if topic.terms)

REFUSAL = topics_chat.REFUSAL
NAME_UNKNOWN = "You have not told me your name."


def bare(term: str) -> str:
    """The term without its article."""
    for article in ("a ", "an ", "the "):
        if term.startswith(article):
            return term.removeprefix(article)
    return term


def _framed(frames: tuple[str, ...], term: str, rng: random.Random) -> str:
    return rng.choice(frames).replace("{a}", term).replace("{t}", bare(term))


def _wrapped(question: str, rng: random.Random, share: float = 0.22) -> str:
    return wrap(question, WRAPPERS, rng) if rng.random() < share else question


def ask(topic: Topic, rng: random.Random) -> tuple[str, str]:
    """A training question about the topic and its answer."""
    n_framed = 3 if topic.terms else 0
    brief = topic not in CHAT_TOPICS and rng.random() < 0.12
    if n_framed and rng.random() < n_framed / (n_framed + len(topic.train_asks)):
        term = rng.choice(topic.terms)
        question = _framed(SHORTS if brief else DEFINITIONS, term, rng)
    else:
        question = expand(rng.choice(topic.train_asks), rng)
        if brief:
            question = wrap(question, SHORT_WRAPPERS, rng)
    if topic not in CHAT_TOPICS and not brief:
        question = _wrapped(question, rng)
    return dress(question, rng), topic.short if brief else topic.answer


def system_turn(rng: random.Random, share: float = 0.12) -> list[Message]:
    return (
        [{"role": "system", "content": expand(rng.choice(SYSTEM_PROMPTS), rng)}]
        if rng.random() < share
        else []
    )


def single(rng: random.Random) -> Sample:
    question, answer = ask(rng.choice(TOPICS), rng)
    return Sample((*system_turn(rng), user(question), assistant(answer)), "single")


def off_topic_question(rng: random.Random) -> str:
    slots = topics_chat.OFF_SLOTS
    if rng.random() < 0.12:
        slots = {
            **slots,
            "thing": (invented(rng).lower(),),
            "person": (invented(rng),),
            "country": (invented(rng),),
        }
    question = fill(rng.choice(topics_chat.OFF_PATTERNS), slots, rng)
    return dress(_wrapped(question, rng), rng)


def off_topic(rng: random.Random) -> Sample:
    return Sample((*system_turn(rng), user(off_topic_question(rng)), assistant(REFUSAL)), "off_topic")


class Talk:
    """A conversation being made: what has been said, and what a follow-up may refer to."""

    def __init__(self, rng: random.Random, heldout: bool = False) -> None:
        self.rng = rng
        self.follow_ups = HELDOUT_FOLLOW_UPS if heldout else FOLLOW_UPS
        self.heldout = heldout
        self.messages: list[Message] = system_turn(rng, 0.0 if heldout else 0.08)
        self.topic: Topic | None = None
        self.name: str | None = None
        self.just_asked = False

    def say(self, question: str, answer: str) -> None:
        self.messages += [user(dress(question, self.rng, 0.0 if self.heldout else 0.03)), assistant(answer)]
        self.just_asked = False

    def about(self, topic: Topic) -> None:
        question, answer = ask(topic, self.rng)
        self.messages += [user(question), assistant(answer)]
        self.topic = topic
        self.just_asked = topic not in CHAT_TOPICS

    def introduce(self) -> None:
        self.name = person(self.rng, self.heldout)
        question = self.rng.choice(self.follow_ups["name"])
        self.messages.append(
            user(dress(question, self.rng, 0.0).replace("{n}", self.name).replace("{N}", self.name))
        )
        self.messages.append(assistant(f"Nice to meet you, {self.name}. What would you like to know?"))
        self.just_asked = False
        self.topic = None

    def follow(self, kind: str) -> None:
        """Ask a follow-up of this kind; the conversation must have what it refers to."""
        question = self.rng.choice(self.follow_ups[kind])
        if kind == "name?":
            self.say(question, f"Your name is {self.name}." if self.name else NAME_UNKNOWN)
        elif kind == "again":
            self.say(question, self.messages[-1]["content"])
        elif kind == "ellipsis":
            topic = self.rng.choice(TERMED_TOPICS)
            term = self.rng.choice(topic.terms)
            self.say(question.replace("{a}", term).replace("{t}", bare(term)), topic.answer)
            self.topic, self.just_asked = topic, True
        else:
            assert self.topic is not None
            if kind == "shorter":
                answer = self.topic.short
            elif kind == "asked":
                answer = f"You asked about {self.topic.label}."
            else:
                answer = getattr(self.topic, kind) or UNKNOWN[kind]
            self.say(question, answer)

    def possible(self) -> list[str]:
        """Follow-up kinds that make sense now; kinds that the topic can answer come up more often."""
        kinds = ["name?"] * (3 if self.name else 1)
        if self.topic is not None and self.topic not in CHAT_TOPICS:
            known = [kind for kind in UNKNOWN if getattr(self.topic, kind)]
            kinds += known * 2 + [self.rng.choice(list(UNKNOWN))] + ["again", "ellipsis"]
            if self.just_asked:
                kinds += ["shorter", "asked"]
        return kinds

    def turn(self) -> None:
        roll = self.rng.random()
        kinds = self.possible()
        if len(kinds) > 1 and roll < 0.62:
            self.follow(self.rng.choice(kinds))
        elif self.name and roll < 0.8:
            self.follow("name?")
        elif roll < 0.86:
            self.about(self.rng.choice(SUBJECT_TOPICS))
        elif roll < 0.93:
            self.about(self.rng.choice(CHAT_TOPICS))
        else:
            self.messages += [user(off_topic_question(self.rng)), assistant(REFUSAL)]
            self.topic, self.just_asked = None, False


def multi_turn(rng: random.Random) -> Sample:
    talk = Talk(rng)
    n_turns = rng.choice((2, 2, 3, 3, 4))
    if rng.random() < 0.25:
        talk.introduce()
    elif rng.random() < 0.9:
        talk.about(rng.choice(SUBJECT_TOPICS))
    else:
        talk.about(rng.choice(CHAT_TOPICS))
    for _ in range(n_turns - 1):
        if talk.name is None and rng.random() < 0.05:
            talk.introduce()
        else:
            talk.turn()
    return Sample(tuple(talk.messages), "multi_turn")


def heldout_single(rng: random.Random) -> list[Sample]:
    """Every topic asked in words never seen: held-out frames, held-out asks and held-out wrappers."""
    samples = []

    def add(question: str, answer: str, category: str) -> None:
        samples.append(Sample((user(dress(question, rng, 0.0)), assistant(answer)), category))

    for topic in TOPICS:
        for term in topic.terms[:2]:
            add(_framed(HELDOUT_DEFINITIONS, term, rng), topic.answer, "single/definition")
        if topic.terms:
            add(_framed(HELDOUT_SHORTS, topic.terms[0], rng), topic.short, "single/short")
        for pattern in topic.heldout_asks:
            add(expand(pattern, rng), topic.answer, "single/question")
        if topic.train_asks and topic not in CHAT_TOPICS:
            question = expand(rng.choice(topic.train_asks), rng)
            add(wrap(question, HELDOUT_WRAPPERS, rng), topic.answer, "single/wrapper")
            if len(topic.train_asks) > 2:
                add(wrap(question, HELDOUT_SHORT_WRAPPERS, rng), topic.short, "single/short")
    return samples


def heldout_off_topic(rng: random.Random, n: int = 60) -> list[Sample]:
    slots = topics_chat.OFF_HELDOUT_SLOTS
    patterns = topics_chat.OFF_HELDOUT_PATTERNS
    questions = [fill(patterns[i % len(patterns)], slots, rng) for i in range(n)]
    return [
        Sample((user(dress(question, rng, 0.0)), assistant(REFUSAL)), "off_topic") for question in questions
    ]


def heldout_multi_turn(rng: random.Random, n_per_kind: int = 20) -> list[Sample]:
    """Two to three turns; the last is a follow-up in held-out words, names are held-out names."""
    samples = []
    for kind in (*UNKNOWN, "again", "shorter", "asked", "ellipsis", "name?"):
        for i in range(n_per_kind):
            talk = Talk(rng, heldout=True)
            if kind == "name?":
                talk.introduce()
            if (i % 3 == 0 and kind != "name?") or (kind == "name?" and i % 2 == 0):
                talk.about(rng.choice(SUBJECT_TOPICS))
            if kind != "name?":
                able = [topic for topic in SUBJECT_TOPICS if kind not in UNKNOWN or getattr(topic, kind)]
                talk.about(rng.choice(able))
            talk.follow(kind)
            samples.append(Sample(tuple(talk.messages), f"multi_turn/{kind.strip('?')}"))
    return samples
