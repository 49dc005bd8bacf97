"""Questions as people type them: patterns are expanded, wrapped, cased and misspelt."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_PROJECT = re.compile(r"\bswarmllm\b(?! (daemon|status|peers|models|chat|command))")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

WRAPPERS = (
    "hi, {q}",
    "hello, {q}",
    "hello! {q}",
    "hey, {q}",
    "please tell me: {q}",
    "{q} please",
    "please, {q}",
    "quick question: {q}",
    "i have a question: {q}",
    "one more question: {q}",
    "sorry, {q}",
    "ok, {q}",
    "so, {q}",
    "hey guide, {q}",
    "{q} thanks",
    "i wonder: {q}",
    "just curious: {q}",
    "and {q}",
    "tell me, {q}",
    "good morning, {q}",
    "help me: {q}",
    "i am new here. {q}",
    "question: {q}",
    "next question: {q}",
    "can you tell me: {q}",
    "now, {q}",
    "well, {q}",
    "i want to know: {q}",
    "{q} thank you",
    "my question is: {q}",
)
HELDOUT_WRAPPERS = (
    "dear guide, {q}",
    "excuse me, {q}",
    "may i ask: {q}",
    "another question: {q}",
    "hello guide! {q}",
    "a question for you: {q}",
)


def expand(pattern: str, rng: random.Random) -> str:
    """Choose one alternative in every `[a|b]`."""
    text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), pattern)
    return re.sub(r"  +", " ", text).strip()


def fill(pattern: str, slots: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """Expand a pattern and put a random value into each `{slot}`."""
    return re.sub(r"\{(\w+)\}", lambda match: rng.choice(slots[match.group(1)]), expand(pattern, rng))


def wrap(question: str, wrappers: Sequence[str], rng: random.Random) -> str:
    return rng.choice(wrappers).replace("{q}", question)


def misspell(text: str, rng: random.Random) -> str:
    """Swap, drop, double or replace one letter of one word of at least four letters."""
    words = list(re.finditer(r"[a-zA-Z]{4,}", text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return text[:at] + text[at] + text[at:]
    return text[:at] + rng.choice(_LETTERS) + text[at + 1 :]


def dress(question: str, rng: random.Random, typo_share: float = 0.06) -> str:
    """Vary case and punctuation, and misspell a share of the questions. The words stay."""
    text = question
    if rng.random() < typo_share:
        text = misspell(text, rng)
    if rng.random() < 0.55:
        text = _PROJECT.sub("SwarmLLM", text)
    roll = rng.random()
    if roll < 0.5:
        text = text[:1].upper() + text[1:]
    elif roll < 0.52:
        text = text.upper()
    if rng.random() < 0.4:
        text = re.sub(r"\bi\b", "I", text)
    roll = rng.random()
    if text.endswith("?"):
        if roll < 0.22:
            text = text[:-1]
        elif roll < 0.25:
            text = text + "?"
    elif roll < 0.25 and text[-1:].isalpha():
        text = text + rng.choice((".", "!", "?", "."))
    return text
