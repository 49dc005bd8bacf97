"""From the fields that say how tokens are chosen to what a worker's sampler takes."""

from __future__ import annotations

import msgspec

from swarmllm.api.openai.schema import SamplingFields
from swarmllm.errors import InvalidRequest
from swarmllm_proto.ipc import Sampling

SAMPLING_NAMES = tuple(field.name for field in msgspec.structs.fields(SamplingFields))


def sampling_of(
    body: SamplingFields, *, logprobs: bool = False, top_logprobs: int = 0, json_schema: str = ""
) -> Sampling:
    """Raises InvalidRequest for a bias of what is no token, and for one setting said twice."""
    chosen = {name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    other_name = chosen.pop("repetition_penalty", None)
    if other_name is not None and chosen.setdefault("repeat_penalty", other_name) != other_name:
        raise InvalidRequest("repeat_penalty and repetition_penalty disagree.", field="repetition_penalty")
    chosen["top_k"] = max(0, body.top_k) if body.top_k is not None else Sampling().top_k
    chosen["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    chosen["logit_bias"] = _biases(body.logit_bias or {})
    if body.seed is not None:
        # OpenAI's seeds are 64-bit and signed, libllama's 32-bit.
        chosen["seed"] = body.seed % 2**32
    return msgspec.structs.replace(
        Sampling(), **chosen, logprobs=logprobs, top_logprobs=top_logprobs, json_schema=json_schema
    )


def _biases(by_token: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in by_token:
        if not (token.isascii() and token.isdigit() and len(token) <= 9):
            raise InvalidRequest(f"logit_bias: {token[:20]!r} is no token id.", field="logit_bias")
    return tuple((int(token), bias) for token, bias in by_token.items())
