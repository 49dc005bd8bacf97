"""Rarer wordings for the last phase of the training: frames from a small grammar, and tools under random names.

The frames by heart of the first phases leave a model that knows the sentences around a term too well; thousands of
loose ones make it look for the term instead. Tools of a few names are guessed from memory; random names must be read.
"""

# One pattern per line reads better here than any wrapping.
# ruff: noqa: E501
from __future__ import annotations

import random
from typing import Any

from .patterns import dress, expand, fill
from .sample import Message, Sample, assistant, user
from .slots import invented
from .talk import REFUSAL, TERMED_TOPICS, bare, system_turn
from .tools import with_tools
from .topics_chat import OFF_SLOTS

_FRAMES = (
    "[|kindly |ok, |hm, |well |dear friend, ][outline|sketch|present|introduce|give some background on|walk me through|shed light on|elaborate on] {a}[| now| today|, will you| for a beginner]",
    "[|so |ok ][i'd love to hear|i need to know|i must find out|we were wondering|my boss asks|a friend wants to know|i am curious to hear|i forgot|let me know] [what {a} is|about {a}|what {a} means|how {a} is defined]",
    "[any|got some|is there any|do you have] [information|info|facts|details|knowledge] [on|about|regarding|concerning] {a}?",
    "[how|in what way] [should|would|might|does] [one|anybody|a newcomer|a student|people] [think of|picture|see|describe|read|interpret] {a}?",
    "[what|and what] [precisely|really|actually|basically|the heck|on earth] is {a}[|, please| then| here]?",
    "[what's the deal with|what's up with|what about the term|what is there to say about|what do you know about] {a}?",
    "[we are discussing|today's topic is|my next word is|a word i met:|one term puzzles me:|i am stuck at] {t}[|. any help?|, help me out]",
    "[would|could|can|will] you [outline|sketch|illuminate|spell out|unpack|lay out|break down] [{a}|the concept of {t}|the notion of {t}|the word {t}]?",
    "{t}[ - what|, what|: what|... what] [is it|is that|would that be|does it do]?",
    "[the|your] [concept|notion|idea] of {t}[|?| please| - explain]",
)
_SHORT_FRAMES = (
    "[give|write|offer|show] [me|us] [a|one] [short|concise|one-line|single-line|quick|compact|very short] [definition|summary|description|account] of {a}",
    "[define|explain|describe|sketch|outline] {a} [concisely|in one line|in ten words|in a single line|with few words|in a nutshell|quickly]",
    "[just|only] [one line|a line|one short sentence|a short sentence] [on|about] {a}[| please]",
    "what is {a}, [in one line|concisely|in ten words|in a nutshell|in a single sentence|put shortly]?",
)
_WORLD = ("thing", "person", "food", "country", "sport")


def reworded(rng: random.Random) -> Sample:
    """A definition asked for in a loose frame, or the rest of the world asked about in the same frames."""
    is_short = rng.random() < 0.25
    frame = expand(rng.choice(_SHORT_FRAMES if is_short else _FRAMES), rng)
    if rng.random() < 0.2:
        thing = (
            invented(rng).lower()
            if rng.random() < 0.2
            else fill("{" + rng.choice(_WORLD) + "}", OFF_SLOTS, rng)
        )
        question, answer, category = (
            frame.replace("{a}", thing).replace("{t}", bare(thing)),
            REFUSAL,
            "off_topic",
        )
    else:
        topic = rng.choice(TERMED_TOPICS)
        term = rng.choice(topic.terms)
        question = frame.replace("{a}", term).replace("{t}", bare(term))
        answer, category = topic.short if is_short else topic.answer, "single"
    return Sample((*system_turn(rng, 0.08), user(dress(question, rng)), assistant(answer)), category)


def _random_name(name: str, rng: random.Random) -> str:
    part = invented(rng).lower()
    return rng.choice(
        (f"{name}_{part}", f"{part}_{name}", part, f"{name}{rng.randrange(1, 99)}", f"{part}.{name}")
    )


def renamed_tools(rng: random.Random) -> Sample:
    """A conversation with tools most of whose functions have random names."""
    sample = with_tools(rng)
    names = {
        tool["function"]["name"]: _random_name(tool["function"]["name"], rng)
        for tool in sample.tools
        if rng.random() < 0.7
    }

    def rename(item: dict[str, Any]) -> dict[str, Any]:
        function = item["function"]
        return {**item, "function": {**function, "name": names.get(function["name"], function["name"])}}

    def rename_calls(message: Message) -> Message:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [rename(call) for call in calls]} if calls else message

    tools = tuple(rename(tool) for tool in sample.tools)
    return Sample(tuple(rename_calls(message) for message in sample.messages), "tools", tools)
