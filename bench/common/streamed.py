"""Streamed completions as their readers see them, from ours and from llama.cpp's server alike.

Both are asked at `/v1/completions` with the same text. One event is about one token: whoever puts several
tokens into one event, as we do for those that come within 10 ms, has its events counted as many tokens as
the answer had per event.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from bench.common.raw_stream import Event, Question, stream_all

PATH = "/v1/completions"


def cpu_s(pid: int) -> float:
    """To the nanosecond, by the clock of a process as clock_getcpuclockid(3) names it; /proc counts ticks of
    10 ms."""
    return time.clock_gettime((~pid << 3) | 2)


def letters(n: int, seed: int) -> str:
    """A text of n tokens for the models of `shapes`, and about as many for others."""
    return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=n))


@dataclass(frozen=True)
class Endpoint:
    name: str
    api_url: str
    model: str
    pids: tuple[int, ...] = ()
    """Of all processes that answer."""

    def cpu_s(self) -> float:
        """What they have had of the processor since they began."""
        return sum(map(cpu_s, self.pids))

    def question(self, prompt: str, n_tokens: int) -> Question:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Question(self.api_url, PATH, body)


@dataclass(frozen=True)
class Reading:
    """One answer: when its text came, by `time.perf_counter`."""

    times_s: tuple[float, ...]
    """Of each event that brought text."""
    end_s: float
    n_tokens: int
    n_prompt_tokens: int

    @staticmethod
    def of(events: Sequence[Event], *, is_whole: bool = True) -> Reading:
        """Not whole: one that its reader left. It has no end, and nobody counted its tokens."""
        times_s: list[float] = []
        end_s = 0.0
        usage: dict[str, int] = {}
        for event in events:
            if "error" in event.content:
                raise RuntimeError(event.content["error"])
            usage = event.content.get("usage") or usage
            for choice in event.content.get("choices", ()):
                if choice.get("text"):
                    times_s.append(event.at_s)
                if choice.get("finish_reason"):
                    end_s = event.at_s
        if not times_s or (is_whole and not end_s):
            raise RuntimeError("the answer had no text or no end")
        n_tokens, n_prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
        return Reading(tuple(times_s), end_s, n_tokens, n_prompt_tokens)

    @property
    def first_s(self) -> float:
        return self.times_s[0]

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Between two pieces of text, of those in that time."""
        inside = [at_s for at_s in self.times_s if start_s <= at_s <= end_s]
        return [b - a for a, b in pairwise(inside)]

    def n_between(self, start_s: float, end_s: float) -> float:
        """Tokens that came in (start, end]."""
        n_events = sum(start_s < at_s <= end_s for at_s in self.times_s)
        return n_events * self.n_tokens / len(self.times_s)


@dataclass(frozen=True)
class Together:
    """What streams that ran at the same time did while all of them ran."""

    tokens_per_s: float
    gaps_s: list[float]

    @staticmethod
    def of(readings: Sequence[Reading]) -> Together:
        """From the moment that each has its first token until the first of them ends."""
        start_s = max(reading.first_s for reading in readings)
        end_s = min(reading.end_s for reading in readings)
        gaps_s = [gap_s for reading in readings for gap_s in reading.gaps_s(start_s, end_s)]
        if not gaps_s:
            raise RuntimeError("the streams hardly ran at the same time: they need more tokens")
        n_tokens = sum(reading.n_between(start_s, end_s) for reading in readings)
        return Together(n_tokens / (end_s - start_s), gaps_s)


def ask_all(endpoint: Endpoint, prompts: Sequence[str], n_tokens: int) -> list[Reading]:
    """All at the same time."""
    return [Reading.of(e) for e in stream_all([endpoint.question(prompt, n_tokens) for prompt in prompts])]
