"""Ten nodes, three of which lie in different ways: are all answers right once the liars are known?

    python -m bench.three_liars [--requests 1000]

The bundled model over real workers and the in-memory router. Node "a" asks, and has the first third of the
layers; five nodes have the second third, of which one computes with weights in Q4_0 and one with weights that
are 5 % off (another fine-tune); four have the last third, of which one takes the likeliest token instead of
drawing one. Liars announce to be the fastest. Each answer is compared with that of an uncut model. A liar is
known when its trust is too low for work.
"""

from __future__ import annotations

import swarmllm_workers  # noqa: F401  isort: skip  (its kernels stand before libllama)

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

import llama_cpp
import msgspec
import trio
from msgspec import UNSET

from bench.cheats import fine_tuned
from bench.common.figures import RESULTS, machine
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.checker import Checker
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import InMemoryNetwork, node_id_named
from swarmllm.swarm.in_memory.signer import InMemorySigner
from swarmllm.swarm.peers.trust import WORK_MIN, TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLatency, ShardAnnounce

N_TOKENS: Final = 16
CHECK_S: Final = 10.0
COMMAND: Final = "python -m bench.three_liars"
ORIGIN: Final = node_id_named("a")
Uncut = Callable[[str, Sampling], Awaitable[str]]
"""The answer of a model that is not cut."""


@dataclass
class Outcome:
    """Of requests in their order."""

    wrong: list[int] = field(default_factory=list)
    """Whose text is not that of the uncut model."""
    unanswered: list[int] = field(default_factory=list)
    known_after: dict[NodeId, int] = field(default_factory=dict)
    """Requests until a liar was trusted too little for work."""

    def wrong_after(self, n_liars: int) -> list[int] | None:
        """Of requests that began when all of so many liars were known; None: not all are."""
        if len(self.known_after) < n_liars:
            return None
        return [number for number in self.wrong if number > max(self.known_after.values())]


async def play(
    pipelines: Pipelines,
    trust: Trust,
    entry: CatalogueEntry,
    liars: Collection[NodeId],
    uncut: Uncut,
    n_requests: int,
) -> Outcome:
    """One request after the other; each begins when the checks of those before it are over, as with a client
    that reads what it got."""
    with counted_draws() as drawn:
        return await _play(pipelines, trust, entry, liars, uncut, n_requests, drawn)


@contextmanager
def counted_draws() -> Iterator[list[int]]:
    """The stages that are drawn meanwhile, of all nodes here."""
    drawn: list[int] = []
    draws = Checker.draws

    def counted(self: Checker, context: RequestContext, *, is_whole: bool) -> int | None:
        stage = draws(self, context, is_whole=is_whole)
        if stage is not None:
            drawn.append(stage)
        return stage

    with patch.object(Checker, "draws", counted):
        yield drawn


async def _play(
    pipelines: Pipelines,
    trust: Trust,
    entry: CatalogueEntry,
    liars: Collection[NodeId],
    uncut: Uncut,
    n_requests: int,
    drawn: list[int],
) -> Outcome:
    outcome = Outcome()
    for number in range(1, n_requests + 1):
        text = f"{number}: what is layer {number % 12} of a pipeline that runs over {number} nodes?"
        sampling = Sampling(temperature=1.5 * (number % 2), seed=number, max_tokens=N_TOKENS, ignore_eos=True)
        try:
            async with pipelines.generate(Prompt(text=text), entry, sampling) as generation:
                said = "".join([piece.text async for piece in generation])
        except Exception as error:  # An answer that does not come is a finding, whatever it is.
            print(f"request {number}: {error!r}", flush=True)
            outcome.unanswered.append(number)
            continue
        if said != await uncut(text, sampling):
            outcome.wrong.append(number)
        with trio.move_on_after(CHECK_S) as waiting:
            while (counts := pipelines.statistics()).checked + counts.checks_dropped < len(drawn):  # noqa: ASYNC110
                await trio.sleep(0.02)
        if waiting.cancelled_caught:  # A pipeline that was drawn has broken.
            drawn.pop()
        for liar in liars:
            if trust.score(liar) < WORK_MIN:
                outcome.known_after.setdefault(liar, number)
    return outcome


class GreedyPool:
    """A worker pool that takes the likeliest token, whatever was asked for."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def forward(self, model: ModelFile, **call: Any) -> Any:
        if call.get("sampling") is not None:
            call["sampling"] = msgspec.structs.replace(call["sampling"], temperature=0.0)
        return await self._pool.forward(model, **call)


class _Catalogue:
    def __init__(self, entry: CatalogueEntry) -> None:
        self._entry = entry

    def get(self, name_or_id: str) -> CatalogueEntry:
        return self._entry


@dataclass
class Node:
    pipelines: Pipelines
    trust: Trust


@asynccontextmanager
async def open_nodes(
    pools: Mapping[NodeId, Any],
    liars: Collection[NodeId],
    entry: CatalogueEntry,
    *,
    check_rate: float = 1 / 16,
    signs: bool = True,
) -> AsyncIterator[dict[NodeId, Node]]:
    """Connected nodes that know what all of them hold; liars say that they are the fastest. `signs`: all sign
    for their rows."""
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        nodes, registries = {}, []
        for node_id, pool in pools.items():
            router, trust = network.add(node_id), Trust()
            registry = Registry(node_id, trust)
            settings = PipelineSettings(check_rate=check_rate, n_ctx=512)
            catalogue = cast(Catalogue, _Catalogue(entry))
            signer = InMemorySigner(node_id) if signs else None
            pipelines = Pipelines(
                router, registry, pool, catalogue, node_id, settings, trust=trust, signer=signer
            )
            await nursery.start(follow_router, registry, router)
            await nursery.start(pipelines.run)
            nodes[node_id] = Node(pipelines, trust)
            registries.append(registry)
            layer_s = 1e-4 if node_id in liars else 1.0
            latency = ObservedLatency(model_id=entry.model_id, decode_s=layer_s, prefill_s=layer_s)
            held = ShardAnnounce(
                model_id=entry.model_id,
                name=entry.name,
                n_layers=entry.manifest.n_layers,
                ranges=tuple((layers.start, layers.end) for layers in pool.loaded(entry.model_id)),
            )
            record = NodeRecord(
                node_id=node_id,
                nickname=node_id[9:17],
                models=(held,),
                capability=NodeCapability(observed_latencies=(latency,), commits=signs or UNSET),
            )
            await router.publish(encode_record(record))
        with trio.fail_after(30):
            while any(len(registry.nodes()) < len(pools) for registry in registries):  # noqa: ASYNC110
                await trio.sleep(0.01)
        yield nodes
        nursery.cancel_scope.cancel()


def quantised(path: Path, to: Path) -> Path:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    options.pure = True
    if llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(options)):
        raise RuntimeError("Q4_0 cannot be made")
    return to


async def main(n_requests: int) -> None:
    liars = {node_id_named(name): name for name in ("quantised", "tuned", "greedy")}
    names = ("a", "quantised", "tuned", "b", "c", "d", "greedy", "e", "f", "g")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entry = Catalogue(folder / "models.sqlite").ensure(GUIDE_PATH, "guide")
        paths = {
            "quantised": quantised(GUIDE_PATH, folder / "q4.gguf"),
            "tuned": fine_tuned(GUIDE_PATH, folder / "tuned.gguf", 0.05),
        }
        n_layers = entry.manifest.n_layers
        third = n_layers // 3
        model = ModelFile(entry.model_id, entry.path)
        async with AsyncExitStack() as stack:

            async def started(number: int, path: Path, layers: LayerRange) -> WorkerPool:
                settings = WorkerSettings(cache_dir=folder / f"cache{number}", n_ctx=512, n_slots=4)
                pool = WorkerPool(settings, folder / f"run{number}")
                await stack.enter_async_context(pool.running())
                await pool.load(ModelFile(entry.model_id, path), layers)
                return pool

            pools: dict[NodeId, Any] = {}
            for number, name in enumerate(names):
                part = 0 if number == 0 else 1 if number < 6 else 2
                layers = LayerRange(part * third, (part + 1) * third)
                pool: Any = await started(number, paths.get(name, entry.path), layers)
                pools[node_id_named(name)] = GreedyPool(pool) if name == "greedy" else pool
            whole = await started(len(names), entry.path, LayerRange(0, n_layers))

            async def uncut(text: str, sampling: Sampling) -> str:
                tokens = await whole.tokenize(model, text=text)
                async with whole.generate(
                    model, request_id="uncut", tokens=tokens, sampling=sampling
                ) as generation:
                    pieces = [piece async for _, piece in generation]
                return b"".join(pieces).decode()

            began_s = time.monotonic()
            async with open_nodes(pools, liars, entry) as nodes:
                origin = nodes[ORIGIN]
                outcome = await play(origin.pipelines, origin.trust, entry, liars, uncut, n_requests)
                counts = origin.pipelines.statistics()
                honest = [node_id for node_id in pools if node_id not in liars and node_id != ORIGIN]
                figures = {
                    "requests": n_requests,
                    "seconds": round(time.monotonic() - began_s),
                    "liar_known_after": {liars[each]: n for each, n in outcome.known_after.items()},
                    "wrong": outcome.wrong,
                    "wrong_after_all_are_known": outcome.wrong_after(len(liars)),
                    "unanswered": outcome.unanswered,
                    "checks": counts.checked,
                    "checks_wrong": counts.checks_wrong,
                    "checks_disputed": counts.checks_disputed,
                    "least_trust_of_honest": min(origin.trust.score(each) for each in honest),
                    "honest_accused": sum(
                        origin.trust.explain(each).counts.get(TrustEvent.WRONG_RESULT, 0) for each in honest
                    ),
                }
    print(json.dumps(figures, indent=1))
    result = {"machine": machine(), "command": COMMAND, **figures}
    (RESULTS / "three_liars.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    trio.run(main, parser.parse_args().requests)
