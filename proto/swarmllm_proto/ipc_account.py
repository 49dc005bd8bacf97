"""What a generation came to, and how its guesses fared."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import FinishReason, Seconds, TokenCount, WorkerMessage

Guesser: TypeAlias = Literal["again", "lookup", "draft", "swift"]
"""The answer that the same prompt had before, the text so far, a small model, or the model with a part of its
layers."""


class GuessCount(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were guessed in one way, and checked; travels as an array of its fields in this order."""

    by: Guesser
    n_checked: TokenCount
    n_right: TokenCount
    """Of those, the ones that the model then said."""

    def __post_init__(self) -> None:
        if self.n_right > self.n_checked:
            raise ValueError(f"n_right: {self.n_right} of {self.n_checked} guesses")


class GenerateDone(WorkerMessage, frozen=True, tag=True):
    """The last answer to Generate, after its Tokens; the request's slot is free."""

    request_id: str
    finish_reason: FinishReason
    n_prompt_tokens: TokenCount
    n_generated: TokenCount
    prefill_s: Seconds
    decode_s: Seconds
    n_cached_tokens: TokenCount = 0
    """Of the prompt: not computed, because an earlier request began alike."""
    guesses: Annotated[tuple[GuessCount, ...], Meta(max_length=4)] = ()
    """One for each way of guessing that had guesses to be checked."""

    @property
    def n_guessed(self) -> int:
        return sum(each.n_checked for each in self.guesses)

    @property
    def n_guessed_right(self) -> int:
        return sum(each.n_right for each in self.guesses)
