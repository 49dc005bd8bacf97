"""What the last phase of the training practises: follow-ups that have an answer, and words never seen before.

In free conversations most follow-ups have no answer, and the guide learns to say so too easily. And values
invented from a few syllables are guessed rather than copied; glued fragments of other words cannot be.
"""

from __future__ import annotations

import json
import random
import re

from .frames import UNKNOWN
from .more_asks import MORE_ASKS
from .patterns import WRAPPERS, dress, expand, wrap
from .reworded import renamed_tools
from .sample import Message, Sample, assistant, user
from .slots import invented
from .talk import SUBJECT_TOPICS, Talk
from .topic import Topic

_KINDS = (*UNKNOWN, "again", "shorter", "asked", "ellipsis")
_TOPICS_BY_KEY: dict[str, Topic] = {topic.key: topic for topic in SUBJECT_TOPICS}
_WORDS = sorted({word for topic in SUBJECT_TOPICS for word in re.findall(r"[a-z]{4,}", topic.answer.lower())})
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def follow_up(rng: random.Random) -> Sample:
    """One or two questions and a follow-up, which can be answered four times out of five."""
    talk = Talk(rng)
    if rng.random() < 0.3:
        talk.about(rng.choice(SUBJECT_TOPICS))
    kind = rng.choice(_KINDS)
    is_known = kind in UNKNOWN and rng.random() < 0.8
    able = [topic for topic in SUBJECT_TOPICS if not is_known or getattr(topic, kind)]
    talk.about(rng.choice(able))
    talk.follow(kind)
    return Sample(tuple(talk.messages), "multi_turn")


def asked_differently(rng: random.Random) -> Sample:
    """A single question from the additional patterns."""
    key = rng.choice(list(MORE_ASKS))
    question = expand(rng.choice(MORE_ASKS[key]), rng)
    if rng.random() < 0.15:
        question = wrap(question, WRAPPERS, rng)
    return Sample((user(dress(question, rng)), assistant(_TOPICS_BY_KEY[key].answer)), "single")


def mangled(rng: random.Random) -> str:
    """A word glued from fragments of other words, capitalised."""
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        word = rng.choice(_WORDS) if rng.random() < 0.7 else invented(rng).lower()
        start = rng.randrange(len(word))
        parts.append(word[start : start + rng.randrange(2, 6)])
    if rng.random() < 0.2:
        parts.append("".join(rng.choice(_LETTERS) for _ in range(rng.randrange(1, 4))))
    return "".join(parts).capitalize()


def _respelt(sample: Sample, old: str, new: str) -> Sample:
    """Replace a word in everything that is said, tool calls included."""
    word = re.compile(rf"(?<![A-Za-z]){re.escape(old)}(?![A-Za-z])")

    def change(message: Message) -> Message:
        changed = {**message, "content": word.sub(new, message["content"])}
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": word.sub(new, call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        return changed

    return Sample(tuple(change(message) for message in sample.messages), sample.category, sample.tools)


def odd_tools(rng: random.Random) -> Sample:
    """A conversation with renamed tools whose one-word arguments are glued words."""
    sample = renamed_tools(rng)
    values = [
        str(value)
        for message in sample.messages
        for call in message.get("tool_calls", ())
        for value in json.loads(call["function"]["arguments"]).values()
    ]
    for value in dict.fromkeys(values):
        if value.isalpha() and value.isascii() and len(value) > 3 and value != "guide":
            new = mangled(rng)
            sample = _respelt(sample, value, new if value[0].isupper() else new.lower())
    return sample


def odd_name(rng: random.Random) -> Sample:
    """A user with a glued name, who asks for it at once or after another question."""
    talk = Talk(rng)
    talk.introduce()
    if rng.random() < 0.5:
        talk.about(rng.choice(SUBJECT_TOPICS))
    talk.follow("name?")
    sample = Sample(tuple(talk.messages), "multi_turn")
    return _respelt(sample, talk.name or "", mangled(rng))
