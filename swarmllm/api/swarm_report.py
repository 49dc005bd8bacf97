"""What an answer says about how it was made: the `swarm` object and the x-swarm headers."""

from __future__ import annotations

from swarmllm.pipeline.generation import Generation, StageReport

Json = dict[str, object]


def swarm_object(generation: Generation) -> Json:
    timings = generation.timings
    # The first token comes out of the prefill.
    n_decoded = generation.n_generated - 1
    tokens_per_s = n_decoded / timings.decode_s if n_decoded > 0 and timings.decode_s > 0 else None
    return {
        "shape": generation.shape,
        "route": [_stage(stage) for stage in generation.route],
        "queue_ms": _ms(timings.queue_s),
        "tokenize_ms": _ms(timings.tokenize_s),
        "prefill_ms": _ms(timings.prefill_s),
        "decode_ms": _ms(timings.decode_s),
        "decode_tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 1),
    }


def swarm_headers(generation: Generation) -> dict[str, str]:
    """Node ids, not nicknames: a nickname may hold anything, a header may not."""
    stages = " ".join(f"{stage.layers}@{stage.node_id}" for stage in generation.route)
    return {
        "x-swarm-route": f"{generation.shape} {stages}",
        "x-swarm-nodes": str(len({stage.node_id for stage in generation.route})),
    }


def _stage(stage: StageReport) -> Json:
    return {
        "node": stage.node_id,
        "nickname": stage.nickname,
        "layers": str(stage.layers),
        "compute_ms_per_token": _ms(stage.compute_s),
        "overhead_ms_per_token": _ms(stage.overhead_s),
        "network_ms_per_token": _ms(stage.network_s),
        "prefill_ms": _ms(stage.prefill_s),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
