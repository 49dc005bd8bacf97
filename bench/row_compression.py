"""What packing the rows between stages costs in quality and gives in time.

    python -m bench.row_compression [--quality-only | --speed-only] [--rounds 3] [--mbit-s 20 100 0]

Quality: the bundled model in three stages over the answers of its held-out conversations, each token
predicted from the true text before it, once with exact rows and once with rows that are rounded to q8_0 at
both hops. The head is computed here, in f32, for both alike.

Speed: two nodes over real connections through a proxy that limits them to 20 and to 100 Mbit/s (10 ms there
and back), and over loopback; a model that is cheap for the width of its rows, so that the line is the limit;
a prompt of 2,000 tokens, and the tokens after it. The four settings take turns, each in a swarm of its own. A
first request, which is not counted, goes over a line that nobody has measured; then both nodes announce what
they measured, as daemons do. Beside each prefill, bytes of rows / throughput: the line alone. The format in
brackets is the one in which rows went between the two stages of the request that is counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio
from gguf import GGUFReader, dequantize

from bench.common.figures import Figure, ratios, write
from bench.common.figures import table as table_of
from bench.common.shapes import Shape, build
from bench.common.wan_proxy import Wan
from bench.wan import node
from swarmllm.guide import GUIDE_PATH
from swarmllm.guide.corpus import heldout
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.route.row_formats import Compression
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLink, ShardAnnounce
from swarmllm_proto.tensors import ROW_FORMATS

THIRDS = (LayerRange(0, 4), LayerRange(4, 8), LayerRange(8, 12))
N_CONVERSATIONS = 400
WIDE = Shape(n_layers=2, n_embd=1024, n_heads=8, n_kv_heads=1, n_ff=256, n_vocab=1024)
N_PROMPT = 2000
CHUNK = 256
RTT_S = 0.01
MBITS = (20.0, 100.0, 0.0)
"""0: loopback, without delay."""
N_TOKENS = 49
MODES: tuple[Compression, ...] = ("off", "lossless", "auto", "q8_0")


# Quality.


async def normed(
    pool: WorkerPool, model: ModelFile, tokens: np.ndarray, name: str, *, is_rounded: bool
) -> np.ndarray:
    """f32 [n, n_embd] after the final norm."""
    rows: Any = tokens
    for layers in THIRDS:
        is_last = layers is THIRDS[-1]
        result = await pool.forward(
            model,
            request_id=name,
            layers=layers,
            position=0,
            tensor=rows,
            want="normed" if is_last else "hidden",
            rounded=is_rounded and not is_last,
        )
        rows = np.array(result.tensor)
    await pool.release(model.model_id, name)
    return np.asarray(rows)


async def quality(folder: Path) -> list[str]:
    entry = Catalogue(folder / "models.sqlite").ensure(GUIDE_PATH, "guide")
    model = ModelFile(entry.model_id, entry.path)
    pool = WorkerPool(WorkerSettings(cache_dir=folder / "cache", n_ctx=2048), folder / "run")
    head = next(t for t in GGUFReader(GUIDE_PATH).tensors if t.name == "output.weight")
    output = dequantize(head.data, head.tensor_type).T
    n_alike = n_tokens = 0
    lost = [0.0, 0.0]
    divergences: list[np.ndarray] = []
    async with pool.running():
        for layers in THIRDS:
            await pool.load(model, layers)
        for number, sample in enumerate(heldout()[:N_CONVERSATIONS]):
            *before, answer = sample.messages
            if not isinstance(answer.get("content"), str) or not answer["content"] or sample.tools:
                continue
            asked = await pool.tokenize(model, messages=list(before))
            said = await pool.tokenize(model, text=answer["content"])
            tokens = np.concatenate((asked, said)).astype(np.int32)
            if len(tokens) > 1024:
                continue
            told = []
            for is_rounded in (False, True):
                rows = await normed(pool, model, tokens, f"{number}-{is_rounded}", is_rounded=is_rounded)
                logits = (rows[len(asked) - 1 : -1] @ output).astype(np.float64)
                logits -= logits.max(axis=1, keepdims=True)
                told.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
            exact, rounded = told
            at = np.arange(len(said))
            n_tokens += len(said)
            n_alike += int((exact.argmax(axis=1) == rounded.argmax(axis=1)).sum())
            lost[0] -= float(exact[at, said].sum())
            lost[1] -= float(rounded[at, said].sum())
            divergences.append((np.exp(exact) * (exact - rounded)).sum(axis=1))
    kl = np.concatenate(divergences)
    plain, packed = (float(np.exp(each / n_tokens)) for each in lost)
    return [
        "| guide, q8_0 at both hops of three stages | |",
        "|---|---|",
        f"| tokens of answers | {n_tokens} |",
        f"| the same likeliest token | {n_alike / n_tokens:.3%} |",
        f"| perplexity, exact | {plain:.5f} |",
        f"| perplexity, q8_0 | {packed:.5f} ({packed / plain - 1:+.3%}) |",
        f"| KL divergence, mean | {kl.mean():.2e} |",
        f"| KL divergence, 99th percentile, largest | {np.percentile(kl, 99):.2e}, {kl.max():.2e} |",
    ]


# Speed.


@asynccontextmanager
async def stage(
    folder: Path,
    entry: CatalogueEntry,
    name: str,
    layers: LayerRange,
    wan: Wan,
    compression: Compression,
    *bootstrap: str,
) -> AsyncIterator[tuple[Any, Registry, Pipelines, Callable[[], Awaitable[None]]]]:
    """The last of the four announces the node anew, with the lines that it has measured."""
    settings = WorkerSettings(cache_dir=folder / f"cache-{name}", n_ctx=N_PROMPT + 64, n_threads=1)
    pool = WorkerPool(settings, folder / f"run-{name}")
    ip = f"127.0.8.{1 + layers.start}"
    own = PipelineSettings(
        prefill_chunk_tokens=CHUNK,
        n_ctx=N_PROMPT + 64,
        shares_prefixes=False,
        activation_compression=compression,
    )
    async with pool.running(), node(folder, name, ip, wan, *bootstrap) as router:
        await pool.load(ModelFile(entry.model_id, entry.path), layers)
        registry = Registry(router.node_id)
        catalogue = Catalogue(folder / "models.sqlite")
        pipelines = Pipelines(router, registry, pool, catalogue, router.node_id, own)
        async with trio.open_nursery() as nursery:
            await nursery.start(follow_router, registry, router)
            await nursery.start(pipelines.run)
            announced = ShardAnnounce(
                model_id=entry.model_id,
                name=entry.name,
                n_layers=entry.manifest.n_layers,
                ranges=((layers.start, layers.end),),
            )

            async def announce() -> None:
                links = tuple(
                    ObservedLink(node_id=peer.node_id, rtt_s=peer.rtt_s, bytes_per_s=peer.bytes_per_s or 0.0)
                    for peer in router.peers()
                    if peer.rtt_s is not None
                )
                capability = NodeCapability(row_formats=ROW_FORMATS[1:], observed_links=links)
                record = NodeRecord(node_id=router.node_id, models=(announced,), capability=capability)
                await router.publish(encode_record(record))

            await announce()
            yield router, registry, pipelines, announce
            nursery.cancel_scope.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 (nothing tells)
        await trio.sleep(0.05)


async def measured(
    folder: Path, entry: CatalogueEntry, mbit: float, compression: Compression
) -> tuple[float, float, str]:
    """Seconds from the first row's start to the first token, milliseconds per token after it, and how rows
    went to the last stage; of the second of two requests."""
    wan = Wan(RTT_S, mbit * 125e3) if mbit else Wan()
    async with (
        stage(folder, entry, "last", LayerRange(1, 2), wan, compression) as (last, _, _, announce),
        stage(folder, entry, "first", LayerRange(0, 1), wan, compression, *last.addresses) as (
            first,
            registry,
            pipelines,
            _,
        ),
    ):

        def said() -> NodeCapability | None:
            record = registry.node(last.node_id)
            return record.capability if record else None

        with trio.fail_after(60):
            await until(lambda: last.node_id in first.connected() and said() is not None)
            await until(lambda: first.node_id in last.connected())
        prefill_s, token_ms, went = 0.0, 0.0, ()
        for seed in range(2):
            if seed:
                before = said()
                await announce()
                with trio.fail_after(60):
                    await until(lambda before=before: said() != before)
            tokens = np.random.default_rng(seed).integers(0, 256, N_PROMPT).tolist()
            went = (await pipelines.plan(entry, RequestSize(N_PROMPT, N_TOKENS))).row_formats
            async with pipelines.generate(
                Prompt(tokens=tokens), entry, Sampling(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True)
            ) as generation:
                assert [piece async for piece in generation]
            assert generation.is_exact is (compression != "q8_0")
            timings = generation.timings
            prefill_s, token_ms = timings.prefill_s, 1000 * timings.decode_s / (N_TOKENS - 1)
    return prefill_s, token_ms, went[-1] if went else "f32"


async def speed(folder: Path, n_rounds: int, mbits: Sequence[float]) -> list[tuple[Figure, Figure | None]]:
    path = build(WIDE, folder / "wide.gguf")
    rows: list[tuple[Figure, Figure | None]] = []
    for mbit in mbits:
        where = f"{mbit:g} Mbit/s" if mbit else "loopback"
        line = f" (the line alone, f32: {N_PROMPT * WIDE.n_embd * 4 / (mbit * 125e3):.2f} s)" if mbit else ""
        figures = {
            mode: (Figure(f"{where}, {mode}{line}", "s"), Figure(f"{where}, {mode}", "ms per token"))
            for mode in MODES
        }
        went: dict[Compression, list[str]] = {mode: [] for mode in MODES}
        for number in range(n_rounds):
            for mode in MODES:
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    entry = Catalogue(Path(own) / "models.sqlite").ensure(path, "wide")
                    *found, row_format = await measured(Path(own), entry, mbit, mode)
                for figure, value in zip(figures[mode], found, strict=True):
                    figure.values.append(value)
                went[mode].append(row_format)
                print(
                    f"{where} {mode} {number}: {found[0]:.2f} s, {found[1]:.2f} ms, {row_format}", flush=True
                )
        for which in range(2):
            for mode in MODES:
                plain, own_figure = figures["off"][which], figures[mode][which]
                own_figure.name += f" ({', '.join(dict.fromkeys(went[mode]))})"
                rows.append((own_figure, None if mode == "off" else ratios(plain, own_figure)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quality-only", action="store_true")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--mbit-s", type=float, nargs="+", default=list(MBITS), help="of the lines; 0: loopback"
    )
    arguments = parser.parse_args()
    text, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.speed_only:
            text += [*trio.run(quality, Path(folder)), ""]
            print("\n".join(text))
        if not arguments.quality_only:
            rows = trio.run(speed, Path(folder), arguments.rounds, arguments.mbit_s)
            text.append(table_of(rows))
            print(text[-1])
    flag = " --quality-only" * arguments.quality_only + " --speed-only" * arguments.speed_only
    name = "row_compression-speed" if arguments.speed_only else "row_compression"
    lines = " ".join(f"{each:g}" for each in arguments.mbit_s)
    command = f"python -m bench.row_compression{flag} --rounds {arguments.rounds} --mbit-s {lines}"
    write(name, command, rows, "\n".join(text))


if __name__ == "__main__":
    main()
