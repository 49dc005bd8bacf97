"""Counters of a node's pipelines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

MissReason: TypeAlias = Literal["late", "busy", "absent", "unreachable", "refused", "wrong"]
"""Why KV that was asked for did not come: not in time, the holder said that it is busy or does not have it,
it could not be asked, this node has no memory or no worker for it, or what came was none."""
DeclineReason: TypeAlias = Literal["no_gain", "first_block_late", "own_speed_unknown", "too_many", "avoided"]
"""Why KV was not asked for: all of it was expected to take too long, or its first block was; this node does
not know how fast it computes, or fetches too much already; or all that have it failed a short time ago."""
MISS_REASONS: Final[tuple[MissReason, ...]] = (
    "late",
    "busy",
    "absent",
    "unreachable",
    "refused",
    "wrong",
)
DECLINE_REASONS: Final[tuple[DeclineReason, ...]] = (
    "no_gain",
    "first_block_late",
    "own_speed_unknown",
    "too_many",
    "avoided",
)


@dataclass(slots=True)
class PipelineStatistics:
    """A snapshot; counts since the start."""

    active_generations: int = 0
    active_stage_requests: int = 0
    """Requests of other nodes."""
    generations: int = 0
    retries: int = 0
    """Further attempts before the first token."""
    reassignments: int = 0
    """Routes left for lighter ones, because of what runs on the nodes that had accepted."""
    recoveries: int = 0
    """Streams that went on over another pipeline."""
    rebuilt: int = 0
    """Of those, the ones of which only the lost stages were computed again."""
    hedges: int = 0
    """Standbys that were started beside a slow pipeline."""
    hedges_won: int = 0
    """Of those, the ones that gave the next token first."""
    repeats: int = 0
    """Jobs repeated after damage."""
    segments_served: int = 0
    """Jobs walked for other nodes."""
    jobs_by_link: int = 0
    """Jobs that this node's workers took from links and ran."""
    checked: int = 0
    """Stages of other nodes whose results were computed again, with an outcome."""
    checks_wrong: int = 0
    checks_disputed: int = 0
    """Of those, the ones in which one of two nodes was wrong, and it cannot be known which."""
    checks_dropped: int = 0
    """Drawn, but rows or somebody to compute them were missing, or there was no time."""
    prefix_hits: int = 0
    """Requests for which KV of their prompt's beginning came from another node."""
    prefix_missed: Counter[MissReason] = field(default_factory=Counter)
    """Holders that were asked for it and did not give all of it."""
    prefix_not_asked: Counter[DeclineReason] = field(default_factory=Counter)
    """Another node announced it, and nobody was asked."""
    prefix_tokens: int = 0
    """Of prompts, that came so."""
    prefix_fetched_bytes: int = 0
    prefix_given_bytes: int = 0
    """KV that other nodes fetched here."""
    prefix_checked: int = 0
    """Beginnings from other nodes of which blocks were computed again, and were right."""
    prefix_wrong: int = 0
    pictures_given: int = 0
    """Pictures encoded for other nodes."""
    pictures_fetched: int = 0
    """Pictures of this node's requests that other nodes encoded."""
    pictures_refused: int = 0
    """Answers of other nodes about pictures that could not be used."""
    messages_ignored: int = 0
    """For requests unknown here, or from nodes that have no part in them."""
    messages_bad: int = 0
