"""Reports how an answer was made: the `swarm` object and the x-swarm headers."""

from __future__ import annotations

from swarmllm import __version__
from swarmllm.node.embeddings import EmbeddingResult
from swarmllm.pipeline.origin.generation import Generation, StageReport
from swarmllm.pipeline.origin.pictures import EncodedBy
from swarmllm_proto.identifiers import NodeId

Json = dict[str, object]


def swarm_object(generation: Generation) -> Json:
    timings = generation.timings
    # The first token comes out of the prefill.
    n_decoded = generation.n_generated - 1
    tokens_per_s = n_decoded / timings.decode_s if n_decoded > 0 and timings.decode_s > 0 else None
    return {
        "shape": generation.shape,
        "exact": generation.is_exact and not any(each.is_rounded for each in generation.looked),
        "apart": generation.is_apart,
        "route": [stage_json(stage) for stage in generation.route],
        "pictures": [_encoded_by_json(each) for each in generation.looked if each.medium == "picture"],
        "sounds": [_encoded_by_json(each) for each in generation.looked if each.medium == "sound"],
        "prefix": _prefix_json(generation),
        "guesses": {"checked": generation.guesses.checked, "right": generation.guesses.right},
        "queue_ms": milliseconds(timings.queue_s),
        "tokenize_ms": milliseconds(timings.tokenize_s),
        "prefill_ms": milliseconds(timings.prefill_s),
        "decode_ms": milliseconds(timings.decode_s),
        "recoveries": generation.n_recoveries,
        "rebuilt": generation.n_rebuilt,
        "recovery_ms": milliseconds(generation.recovery_s),
        "decode_tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 1),
    }


def _encoded_by_json(looked: EncodedBy) -> Json:
    return {
        "node": looked.node_id,
        "nickname": looked.nickname,
        "rows": looked.n_rows,
        "encode_ms": milliseconds(looked.seconds),
        "kept": looked.is_kept,
        "rounded": looked.is_rounded,
    }


def _prefix_json(generation: Generation) -> Json | None:
    """Of KV that came from another node."""
    fetched = generation.fetched
    if fetched is None:
        return None
    return {
        "node": fetched.node_id,
        "tokens": fetched.n_tokens,
        "bytes": fetched.n_bytes,
        "fetch_ms": milliseconds(fetched.seconds),
        "other_format": fetched.other_format,
    }


FINGERPRINT = f"swarmllm-{__version__}"
"""OpenAI's `system_fingerprint`."""


def llamacpp_timings(generation: Generation) -> Json:
    """llama.cpp's `timings`."""
    timings = generation.timings
    n_prompt = generation.n_prompt_tokens - generation.n_cached_tokens
    # The first token comes out of the prefill, so the decode time is that of the others.
    timed = {
        "prompt": (n_prompt, n_prompt, timings.prefill_s),
        "predicted": (generation.n_generated, max(0, generation.n_generated - 1), timings.decode_s),
    }
    told: Json = {"cache_n": generation.n_cached_tokens}
    for name, (n_tokens, n_timed, seconds) in timed.items():
        took_ms = milliseconds(seconds)
        told |= {
            f"{name}_n": n_tokens,
            f"{name}_ms": took_ms,
            f"{name}_per_token_ms": took_ms / n_timed if n_timed else 0.0,
            f"{name}_per_second": 1e3 * n_timed / took_ms if took_ms > 0 else 0.0,
        }
    if generation.guesses.checked:
        told |= {"draft_n": generation.guesses.checked, "draft_n_accepted": generation.guesses.right}
    return told


def swarm_headers(generation: Generation) -> dict[str, str]:
    """Node ids, not nicknames: a nickname may hold anything, a header may not. Server-Timing says as much as
    is known: of a stream, whose headers leave before its tokens, no more than the prefill."""
    stages = [(str(stage.layers), stage.node_id) for stage in generation.route]
    return _route_headers(generation.shape, stages) | {"Server-Timing": _server_timing(generation)}


def embedding_headers(embedded: EmbeddingResult, node_id: NodeId) -> dict[str, str]:
    """The same for vectors. `node_id`: of this node."""
    stages = [(f"{stage.start}:{stage.end}", stage.node_id) for stage in embedded.stages]
    shape = "local" if len(stages) == 1 and stages[0][1] == node_id else "chain"
    known = {"queue": embedded.queue_s, "tokenize": embedded.tokenize_s, "prefill": embedded.prefill_s}
    return _route_headers(shape, stages) | {"Server-Timing": _timing(known)}


def _route_headers(shape: str, stages: list[tuple[str, NodeId]]) -> dict[str, str]:
    return {
        "x-swarm-route": " ".join([shape, *(f"{layers}@{node_id}" for layers, node_id in stages)]),
        "x-swarm-nodes": str(len({node_id for _, node_id in stages})),
    }


def _server_timing(generation: Generation) -> str:
    timings = generation.timings
    known = {"queue": timings.queue_s, "tokenize": timings.tokenize_s, "prefill": timings.prefill_s}
    if generation.finish_reason is not None:
        n_decoded = max(0, generation.n_generated - 1)
        known["decode"] = timings.decode_s
        known["network"] = n_decoded * sum(stage.network_s for stage in generation.route)
    return _timing(known)


def _timing(known: dict[str, float]) -> str:
    return ", ".join(f"{name};dur={milliseconds(seconds)}" for name, seconds in known.items())


def stage_json(stage: StageReport) -> Json:
    return {
        "node": stage.node_id,
        "nickname": stage.nickname,
        "layers": str(stage.layers),
        "compute_ms_per_token": milliseconds(stage.compute_s),
        "overhead_ms_per_token": milliseconds(stage.overhead_s),
        "network_ms_per_token": milliseconds(stage.network_s),
        "prefill_ms": milliseconds(stage.prefill_s),
        "bytes_per_token": stage.row_bytes,
    }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
