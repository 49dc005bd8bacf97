"""Choose the next token from the head's logits, with libllama's samplers.

Greedy is `argmax`, first of equals, as libllama's greedy sampler. Sampling is a function of (logits, seed,
index, tokens generated so far) and of nothing else: the random numbers for token i come from a generator
seeded with (seed, i), so a step that is repeated after a failure, here or on another node, draws the same
token.

Penalties count generated tokens only, as OpenAI defines them; the head of a pipeline does not know the
prompt.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_proto.ipc import Sampling
from swarmllm_workers.errors import CallError

PENALTY_WINDOW: Final = 1024
"""Generated tokens that penalties look back over."""

_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_U32: Final = 2**32


class Sampler:
    """One request's sampler. Raises CallError bad_message for a penalty that divides by zero."""

    def __init__(self, sampling: Sampling) -> None:
        if sampling.repeat_penalty <= 0:
            raise CallError("bad_message", "must be above 0 (1 penalises nothing)", "sampling.repeat_penalty")
        self._sampling = sampling
        self.seed = secrets.randbelow(_U32) if sampling.seed is None else sampling.seed
        self._has_penalties = (
            sampling.repeat_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )

    def sample(self, logits: np.ndarray, index: int, generated: Sequence[int]) -> int:
        """A token id for generated token `index`. `logits` f32 [n_vocab]. Raises CallError engine on NaN."""
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise CallError("engine", "the logits are not finite: the model or its input is damaged")
        if self._sampling.temperature == 0.0 and not self._has_penalties:
            return best
        chain = self._chain(index, len(logits))
        try:
            for token in generated[-PENALTY_WINDOW:] if self._has_penalties else ():
                lib.llama_sampler_accept(chain, token)
            return _apply(chain, logits)
        finally:
            lib.llama_sampler_free(chain)

    def _chain(self, index: int, n_vocab: int) -> Any:
        sampling = self._sampling
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        samplers = []
        if self._has_penalties:
            samplers.append(
                lib.llama_sampler_init_penalties(
                    n_vocab,
                    PENALTY_WINDOW,
                    sampling.repeat_penalty,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature == 0.0:
            samplers.append(lib.llama_sampler_init_greedy())
        else:
            if sampling.top_k > 0:
                samplers.append(lib.llama_sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1.0:
                samplers.append(lib.llama_sampler_init_top_p(sampling.top_p, 1))
            if sampling.min_p > 0.0:
                samplers.append(lib.llama_sampler_init_min_p(sampling.min_p, 1))
            samplers.append(lib.llama_sampler_init_temp(sampling.temperature))
            samplers.append(lib.llama_sampler_init_dist(_mix(self.seed, index)))
        for sampler in samplers:
            lib.llama_sampler_chain_add(chain, sampler)
        return chain


def _apply(chain: Any, logits: np.ndarray) -> int:
    candidates = np.empty(len(logits), _CANDIDATE)
    candidates["id"] = np.arange(len(logits), dtype=np.int32)
    candidates["logit"] = logits
    candidates["p"] = 0.0
    array = lib.llama_token_data_array(
        data=candidates.ctypes.data_as(lib.llama_token_data_p),
        size=len(candidates),
        selected=-1,
        sorted=False,
    )
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    if not 0 <= array.selected < array.size:
        raise CallError("engine", "the sampler selected nothing")
    return int(array.data[array.selected].id)


def _mix(seed: int, index: int) -> int:
    """Distinct, well spread 32-bit seeds for the steps of a request (splitmix64)."""
    z = (seed * 0x1_0000_0001 + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % _U32
