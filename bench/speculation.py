"""Tokens/s with each way of guessing; the rival is the same worker without guesses.

    python -m bench.speculation --rounds 3

Three texts. "repetitive": a 0.5B-shaped model whose layers add nothing and whose tokens have one of 16
embeddings, so that each token depends on the one before alone and the text soon goes round in a circle; it
costs what any model of that shape costs.
"free": the same shape with random layers, whose text never repeats itself: what trying costs. "guide": the
bundled model answers questions, with its draft model, too. It fits in the cache of
a core, so checking a row costs it as much as computing one: no guess can help it much.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import trio
from gguf import GGUFReader

from bench.common.figures import Figure, publish, ratios
from bench.common.shapes import HALF_BILLION, build
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.pool import WorkerPool
from swarmllm.workerpool.settings import ModelFile, WorkerSettings
from swarmllm_proto.ipc import Sampling

QUESTIONS = (
    "What is a pipeline?",
    "How do I load a model on two nodes?",
    "Which ports does a node listen on?",
    "What happens when a node leaves?",
)

N_EMBEDDINGS = 16


def silence_layers(path: Path) -> Path:
    """Zero what attention and feed-forward add to the stream, and give tokens one of few embeddings."""
    reader = GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            tensor.data[:] = tensor.data[np.arange(len(tensor.data)) % N_EMBEDDINGS]
        if tensor.name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor.data[:] = 0
    reader.data.flush()
    return path


async def tokens_per_s(
    pool: WorkerPool, model: ModelFile, prompts: Sequence[np.ndarray], n_tokens: int
) -> tuple[float, list[int], int, int]:
    """From the first token on, of all prompts in turn; the text, guesses checked and right."""
    seconds, text, n_checked, n_right = 0.0, [], 0, 0
    sampling = Sampling(temperature=0.0, max_tokens=n_tokens, ignore_eos=True)
    for prompt in prompts:
        async with pool.generate(model, request_id="bench", tokens=prompt, sampling=sampling) as generation:
            started_s = 0.0
            async for token, _ in generation:
                started_s = started_s or trio.current_time()
                text.append(token.token)
            seconds += trio.current_time() - started_s
            assert generation.done is not None
            n_checked += generation.done.n_guessed
            n_right += generation.done.n_guessed_right
    return (n_tokens - 1) * len(prompts) / seconds, text, n_checked, n_right


async def measure_text(
    arguments: argparse.Namespace, name: str, gguf: Path, ways: dict[str, WorkerSettings], folder: Path
) -> list[tuple[Figure, Figure | None]]:
    model = ModelFile("0" * 64, gguf)
    pools = {way: WorkerPool(settings, folder / f"run-{way}") for way, settings in ways.items()}
    figures = {way: Figure(f"{name}: {way}", "tokens/s") for way in ways}
    counts: dict[str, tuple[int, int]] = {}
    n_layers = 12 if name == "guide" else HALF_BILLION.n_layers
    async with AsyncExitStack() as stack:
        for pool in pools.values():
            await stack.enter_async_context(pool.running())
            await pool.load(model, LayerRange(0, n_layers), None)
        if name == "guide":
            first = next(iter(pools.values()))
            messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
            prompts = [np.asarray(await first.tokenize(model, messages=each)) for each in messages]
        elif name == "repetitive":  # well into the circle
            start = np.arange(40, dtype=np.int32)
            _, text, *_ = await tokens_per_s(next(iter(pools.values())), model, [start], 200)
            prompts = [np.array(text, np.int32)]
        else:
            prompts = [np.random.default_rng(1).integers(0, 250, 100).astype(np.int32)]
        for i in range(arguments.rounds + 1):
            texts = []
            for way, pool in pools.items():
                speed, text, *counted = await tokens_per_s(pool, model, prompts, arguments.tokens)
                texts.append(text)
                if i:  # the first round warms up
                    figures[way].values.append(speed)
                    counts[way] = counted[0], counted[1]
            assert all(text == texts[0] for text in texts), "the text changed"
    for way, figure in figures.items():
        checked, right = counts[way]
        figure.name += f" ({right} of {checked} guesses right)" if checked else ""
    plain = figures["none"]
    return [(f, None if f is plain else ratios(f, plain)) for f in figures.values()]


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    none = WorkerSettings(
        cache_dir=folder / "segments", n_ctx=2048, n_threads=arguments.threads, n_prefixes=0, ngram_max_size=0
    )
    lookup = replace(none, ngram_max_size=4)
    swift = replace(none, swift_gamma=4)
    rows: list[tuple[Figure, Figure | None]] = []
    for name in arguments.texts:
        ways = {"none": none, "n-gram lookup": lookup, "layers left out": swift}
        if name == "guide":
            ways |= {"draft model": replace(none, uses_draft_model=True)}
            gguf = GUIDE_PATH
        else:
            gguf = build(HALF_BILLION, folder / f"{name}.gguf")
            if name == "repetitive":
                silence_layers(gguf)
        (folder / name).mkdir()
        rows += await measure_text(arguments, name, gguf, ways, folder / name)
        if name != "guide":
            gguf.unlink()
    command = (
        f"python -m bench.speculation --rounds {arguments.rounds} --tokens {arguments.tokens} "
        f"--threads {arguments.threads} --texts {' '.join(arguments.texts)}"
    )
    publish("speculation", command, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--texts", nargs="+", default=["repetitive", "free", "guide"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trio.run(measure, arguments, Path(folder))


if __name__ == "__main__":
    main()
