"""Counters of a node's pipelines."""

from __future__ import annotations

from dataclasses import dataclass


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
    prefix_misses: int = 0
    """It was asked for, and did not come in time or was refused."""
    prefix_declined: int = 0
    """Another node announced it, and computing it was expected to take no longer."""
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
