"""A streamed chat completion as seen by a terminal: pieces of text, then how it went.

Reads the same server-sent events that any OpenAI client reads, and the `swarm` object that a SwarmLLM node
adds to the last chunk: which node ran which layers, and how long it took.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from swarmllm.cli.client import Client

Message = dict[str, Any]
"""`role`, and `content`: a text, or parts in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class ShownStage:
    """One stage of the pipeline that answered."""

    node_id: str
    nickname: str
    layers: str
    compute_ms_per_token: float | None
    overhead_ms_per_token: float | None
    network_ms_per_token: float | None
    prefill_ms: float | None
    bytes_per_token: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer."""

    finish_reason: str
    route: tuple[ShownStage, ...]
    prefill_ms: float | None
    decode_tokens_per_s: float | None
    n_prompt_tokens: int
    n_generated: int
    swarm: dict[str, Any]
    reasoning: str = ""
    """The reasoning before the answer."""


def stream_chat(
    client: Client,
    model: str,
    messages: Sequence[Message],
    on_reasoning: Callable[[str], None] = lambda piece: None,
    /,
    **sampling: object,
) -> Generator[str | Finished, None, None]:
    """Yields pieces of text and, last, one Finished. Closing the iterator early stops the computation.
    `on_reasoning` hears the pieces of what the model thinks before it answers.

    `sampling`: fields of the request (temperature, max_tokens, seed ...); None means not sent.
    """
    body: dict[str, object] = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {name: value for name, value in sampling.items() if value is not None}
    finish_reason = ""
    reasoning_pieces: list[str] = []
    swarm: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    for chunk in client.post_chunks("/v1/chat/completions", body):
        swarm = chunk.get("swarm") or swarm
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            finish_reason = choice.get("finish_reason") or finish_reason
            if reasoning := choice.get("delta", {}).get("reasoning_content"):
                reasoning_pieces.append(str(reasoning))
                on_reasoning(reasoning_pieces[-1])
            if text := choice.get("delta", {}).get("content"):
                yield str(text)
    yield _finished(finish_reason, "".join(reasoning_pieces), swarm, usage)


def _finished(finish_reason: str, reasoning: str, swarm: dict[str, Any], usage: dict[str, Any]) -> Finished:
    return Finished(
        finish_reason=finish_reason,
        route=tuple(_stage(stage) for stage in swarm.get("route", ())),
        prefill_ms=swarm.get("prefill_ms"),
        decode_tokens_per_s=swarm.get("decode_tokens_per_s"),
        n_prompt_tokens=int(usage.get("prompt_tokens", 0)),
        n_generated=int(usage.get("completion_tokens", 0)),
        swarm=swarm,
        reasoning=reasoning,
    )


def _stage(stage: dict[str, Any]) -> ShownStage:
    return ShownStage(
        node_id=str(stage.get("node", "")),
        nickname=str(stage.get("nickname", "")),
        layers=str(stage.get("layers", "")),
        compute_ms_per_token=stage.get("compute_ms_per_token"),
        overhead_ms_per_token=stage.get("overhead_ms_per_token"),
        network_ms_per_token=stage.get("network_ms_per_token"),
        prefill_ms=stage.get("prefill_ms"),
        bytes_per_token=stage.get("bytes_per_token"),
    )


def as_fields(text: str, finished: Finished) -> dict[str, object]:
    """An answer for programs."""
    return {
        "text": text,
        **({"reasoning": finished.reasoning} if finished.reasoning else {}),
        "finish_reason": finished.finish_reason,
        "usage": {
            "prompt_tokens": finished.n_prompt_tokens,
            "completion_tokens": finished.n_generated,
        },
        "swarm": finished.swarm,
    }
