"""One streamed completion with a stopwatch, and what a handful of them add up to.

Times are a client's: taken when a line of the stream has been read here, so they hold everything a user
would wait for. A chunk may hold several tokens (speculation) or none that can be shown yet, so the pace per
token is the stream's whole length over its tokens, and only the gaps between chunks are taken one by one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from swarmllm.cli.client import Client
from swarmllm.cli.errors import CommandFailed


@dataclass(frozen=True, slots=True)
class TimedStream:
    """All in seconds on one clock."""

    started_s: float
    first_s: float
    """The first text was there."""
    ended_s: float
    gaps_s: tuple[float, ...]
    """Between two chunks of text."""
    n_prompt_tokens: int
    n_generated: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of streams that ran at the same time."""

    n_streams: int
    n_prompt_tokens: int
    """The longest prompt."""
    first_token_s: float
    """Median over the streams, from the request to the first text."""
    prefill_tokens_per_s: float
    """Of all streams together, until the last of them had its first text."""
    gap_s: float
    """Median between two chunks."""
    slow_gap_s: float
    """95th percentile."""
    stream_tokens_per_s: float
    """Median over the streams, after the first text."""
    tokens_per_s: float
    """Of all streams together, from the first text of any to the end of the last."""


def time_completion(client: Client, body: dict[str, object]) -> TimedStream:
    """Runs `/v1/completions` with `body`, streamed. Raises CommandFailed, also for an answer without text."""
    started_s = time.monotonic()
    seen_s: list[float] = []
    usage: dict[str, int] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.post_chunks("/v1/completions", body | options):
        usage = chunk.get("usage") or usage
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            seen_s.append(time.monotonic())
    if not seen_s or not usage:
        raise CommandFailed("The answer has no text to time.")
    return TimedStream(
        started_s=started_s,
        first_s=seen_s[0],
        ended_s=seen_s[-1],
        gaps_s=tuple(later - earlier for earlier, later in pairwise(seen_s)),
        n_prompt_tokens=int(usage["prompt_tokens"]),
        n_generated=int(usage["completion_tokens"]),
    )


def figures(streams: Sequence[TimedStream]) -> Figures:
    """`streams`: at least one, started together."""
    first_s = min(stream.first_s for stream in streams)
    all_first_s = max(stream.first_s for stream in streams) - min(stream.started_s for stream in streams)
    gaps_s = sorted(gap_s for stream in streams for gap_s in stream.gaps_s) or [0.0]
    n_after_first = sum(stream.n_generated - 1 for stream in streams)
    return Figures(
        n_streams=len(streams),
        n_prompt_tokens=max(stream.n_prompt_tokens for stream in streams),
        first_token_s=_middle([stream.first_s - stream.started_s for stream in streams]),
        prefill_tokens_per_s=_rate(sum(stream.n_prompt_tokens for stream in streams), all_first_s),
        gap_s=_middle(gaps_s),
        slow_gap_s=gaps_s[min(len(gaps_s) - 1, int(0.95 * len(gaps_s)))],
        stream_tokens_per_s=_middle(
            [_rate(stream.n_generated - 1, stream.ended_s - stream.first_s) for stream in streams]
        ),
        tokens_per_s=_rate(n_after_first, max(stream.ended_s for stream in streams) - first_s),
    )


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rate(n_tokens: int, seconds: float) -> float:
    return n_tokens / seconds if seconds > 0 else 0.0
