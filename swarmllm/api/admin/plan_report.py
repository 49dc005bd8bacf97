"""The JSON of a plan, and the request size it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarmllm.errors import InvalidRequest
from swarmllm.models import LayerRange
from swarmllm.pipeline.route.route_planner import DEFAULT_SIZE, RequestSize
from swarmllm.scheduling.plan import Plan
from swarmllm_proto.identifiers import NodeId

MAX_TOKENS = 2**20
Json = dict[str, object]


def read_size(arguments: Mapping[str, str]) -> tuple[str, RequestSize]:
    """(model, size) from a query string. Raises InvalidRequest naming the field."""
    unknown = set(arguments) - {"model", "prompt_tokens", "output_tokens"}
    if unknown:
        name = min(unknown)
        raise InvalidRequest(
            f"{name[:80]!r} is unknown; known are model, prompt_tokens, output_tokens.", field=name[:80]
        )
    model = arguments.get("model", "")
    if not model:
        raise InvalidRequest("model is missing: name the model to plan for.", field="model")
    return model, RequestSize(
        _count(arguments, "prompt_tokens", DEFAULT_SIZE.n_prompt_tokens),
        _count(arguments, "output_tokens", DEFAULT_SIZE.n_output_tokens),
    )


def plan_report(model: str, size: RequestSize, plan: Plan, nickname_of: Callable[[NodeId], str]) -> Json:
    def on(node_id: NodeId) -> Json:
        return {"node_id": node_id, "nickname": nickname_of(node_id)}

    def with_layers(node_id: NodeId, layers: LayerRange) -> Json:
        return on(node_id) | {"layers": str(layers)}

    return {
        "model": model,
        "prompt_tokens": size.n_prompt_tokens,
        "output_tokens": size.n_output_tokens,
        "cost_s": plan.cost_s,
        "ends_s": plan.ends_s,
        "stages": [
            with_layers(stage.node_id, stage.layers)
            | {
                "compute_s": stage.compute_s,
                "network_s": stage.network_s,
                "measured": stage.is_measured,
                "lacks": stage.lacks,
                "standby": stage.standby,
                "alternatives": [
                    with_layers(other.node_id, other.layers)
                    | {"extra_s": other.extra_s, "full": other.is_full}
                    for other in stage.alternatives
                ],
            }
            for stage in plan.stages
        ],
        "rivals": [
            {
                "name": rival.name,
                "cost_s": rival.cost_s,
                "stages": [with_layers(stage.node_id, stage.layers) for stage in rival.stages],
            }
            for rival in plan.rivals
        ],
        "refused": [
            with_layers(refusal.node_id, refusal.layers) | {"reason": refusal.reason}
            for refusal in plan.refused
        ],
    }


def _count(arguments: Mapping[str, str], name: str, default: int) -> int:
    text = arguments.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= MAX_TOKENS):
        raise InvalidRequest(f"{name} must be a whole number from 1 to {MAX_TOKENS}.", field=name)
    return int(text)
