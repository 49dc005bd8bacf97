"""Processor time of choosing one token, beside libllama's samplers over a list of every token.

    python -m bench.sampling

Steps of both take turns, for one stream and for eight whose logits are looked at one after the other. Logits
are random: a few likely tokens in front of a normal distribution, as trained models have them (two to four
bits of entropy), and "flat" ones with only the normal distribution, where a thousand tokens are as likely as
one another: the worst case.
"""

from __future__ import annotations

import swarmllm_workers  # noqa: F401  isort: skip  (its kernels stand before libllama)

import argparse
import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from bench.common.figures import Figure, ratios, table, write
from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode.sampling import DRY_WINDOW, Sampler, step_seed
from swarmllm_workers.grammars.gbnf_matcher import CANDIDATE

SETTINGS = {
    "temperature 1": Sampling(temperature=1.0, seed=1),
    "temperature 0.8, top_p 0.95": Sampling(temperature=0.8, top_p=0.95, seed=1),
    "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05": Sampling(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1
    ),
    "the same with penalties": Sampling(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, presence_penalty=0.2, seed=1
    ),
}
GENERATED = tuple(range(300))


def whole_list(sampling: Sampling, logits: np.ndarray, index: int, generated: Sequence[int]) -> int:
    """The token that libllama's samplers choose from a list of every token. For settings with penalties,
    top_k, top_p, min_p and a temperature above 0."""
    seed = step_seed(sampling.seed or 0, index)
    samplers: list[Any] = []
    if sampling.repeat_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty:
        penalties = sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty
        samplers.append(lib.llama_sampler_init_penalties(len(logits), DRY_WINDOW, *penalties))
    if sampling.top_k > 0:
        samplers.append(lib.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1.0:
        samplers.append(lib.llama_sampler_init_top_p(sampling.top_p, 1))
    if sampling.min_p > 0.0:
        samplers.append(lib.llama_sampler_init_min_p(sampling.min_p, 1))
    samplers += [lib.llama_sampler_init_temp(sampling.temperature), lib.llama_sampler_init_dist(seed)]
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in samplers:
        lib.llama_sampler_chain_add(chain, sampler)
    for token in generated if len(samplers) > 2 else ():
        lib.llama_sampler_accept(chain, token)
    entries = np.zeros(len(logits), CANDIDATE)
    entries["id"], entries["logit"] = np.arange(len(logits)), logits
    array = lib.llama_token_data_array(
        data=entries.ctypes.data_as(lib.llama_token_data_p), size=len(entries), selected=-1, sorted=False
    )
    lib.llama_sampler_apply(chain, ctypes.byref(array))
    token = int(array.data[array.selected].id)
    lib.llama_sampler_free(chain)
    return token


def random_logits(n_vocab: int, seed: int, *, is_flat: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n_vocab) * (3.0 if is_flat else 2.0)).astype(np.float32)
    if not is_flat:
        likely = rng.choice(n_vocab, 500, replace=False)
        logits[likely] = 18.0 - 2.0 * np.log(np.arange(1, 501)) + rng.standard_normal(500) * 0.5
    return logits


def measure(
    name: str, sampling: Sampling, n_vocab: int, n_streams: int, n_rounds: int, *, is_flat: bool
) -> tuple[Figure, Figure]:
    """Milliseconds per token of ours, and of the whole list."""
    rows = [random_logits(n_vocab, i, is_flat=is_flat) for i in range(n_streams)]
    samplers = [Sampler(sampling, n_vocab=n_vocab) for _ in rows]
    name = f"{name}, {n_vocab // 1000}k tokens, {n_streams} streams{', flat' if is_flat else ''}"
    ours, whole = Figure(name, "ms"), Figure(f"whole list, {name}", "ms")
    for index in range(n_rounds + 1):
        start_s = time.process_time()
        for sampler, row in zip(samplers, rows, strict=True):
            sampler.sample(row, index, GENERATED)
        ours_s = time.process_time() - start_s
        start_s = time.process_time()
        for row in rows:
            whole_list(sampling, row, index, GENERATED)
        if index:
            ours.values.append(ours_s * 1000 / n_streams)
            whole.values.append((time.process_time() - start_s) * 1000 / n_streams)
    return ours, whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    rows: list[tuple[Figure, Figure | None]] = []
    for n_vocab in (32_000, 152_064):
        for n_streams in (1, 8):
            for name, sampling in SETTINGS.items():
                pair = measure(name, sampling, n_vocab, n_streams, arguments.rounds, is_flat=False)
                rows += [(pair[0], ratios(*pair)), (pair[1], None)]
    pair = measure("temperature 1", SETTINGS["temperature 1"], 152_064, 1, arguments.rounds, is_flat=True)
    rows += [(pair[0], ratios(*pair)), (pair[1], None)]
    text = table(rows)
    print(text)
    write("sampling", f"python -m bench.sampling --rounds {arguments.rounds}", rows, text)


if __name__ == "__main__":
    main()
