"""The bundled model over real workers: honest stages are right to the bit, coarser weights are not."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import llama_cpp
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from kernel_timings import KERNEL_TIMINGS

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check import checker
from swarmllm.pipeline.check.sampling import Budget
from swarmllm.pipeline.check.thresholds import Limits
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import KvType, Sampling
from swarmllm_proto.swarm import NodeCapability

from .fakes import Swarm, computes, open_swarm

pytestmark = [pytest.mark.slow, pytest.mark.long]

A, B, C, D, M, N = (node_id_named(name) for name in "abcdmn")
HOLDINGS = {A: "0:4", B: "4:8", M: "4:8", N: "4:8", C: "8:12", D: "8:12"}
LONG_QUESTION = "Which node computes layers 4 to 8, and what does it get from the one before it? " * 5
QUESTIONS = ("What is a pipeline?", "How do I load layers 0 to 4 of the guide?", "Who is the origin?")


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@asynccontextmanager
async def guide_swarm(
    folder: Path,
    entry: CatalogueEntry,
    weights_of_b: Path,
    noise_of_b: float = 0.0,
    *,
    weights_of_c: Path | None = None,
    origin_has: Sequence[NodeId] = (),
    kv_types: Mapping[NodeId, KvType] = MappingProxyType({}),
    change_b: Callable[[WorkerPool], None] | None = None,
) -> AsyncIterator[Swarm]:
    """B and C are faster than the others that have their layers, and get the work. `origin_has`: the layers
    of these, too. `kv_types`: how nodes keep keys and values, where that is not f16."""
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id, layers in HOLDINGS.items():
            settings = WorkerSettings(
                cache_dir=folder / f"cache-{node_id}",
                kernel_timings=KERNEL_TIMINGS,
                n_ctx=1024,
                n_slots=4,
                kv_type=kv_types.get(node_id, "f16"),
            )
            pools[node_id] = WorkerPool(settings, folder / f"run-{len(pools)}")
            await stack.enter_async_context(pools[node_id].running())
            weights = {B: weights_of_b, C: weights_of_c or entry.path}
            model = ModelFile(entry.model_id, weights.get(node_id, entry.path))
            await pools[node_id].load(model, LayerRange.parse(layers))
            if node_id == A:
                for other in origin_has:
                    await pools[A].load(model, LayerRange.parse(HOLDINGS[other]))
        if change_b is not None:
            change_b(pools[B])
        if noise_of_b:
            lies_steadily(pools[B], noise_of_b)
        settings = PipelineSettings(prefill_chunk_tokens=16, n_ctx=1024, check_rate=0.2, hedge=0.0)
        swarm = await stack.enter_async_context(open_swarm(pools, settings=settings, entry=entry))
        await swarm.tell(A, {node_id: computes(entry.model_id, 10.0) for node_id in (D, M, N)})
        await swarm.tell(A, {node_id: computes(entry.model_id, 1e-4) for node_id in (B, C)})
        yield swarm


@dataclass
class Trusting:
    """Notes events in a book, and has every node but one checked as seldom as can be."""

    book: Trust
    checked: str

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        self.book.note(node_id, event, detail)

    def score(self, node_id: NodeId) -> float:
        return -1e9 if node_id == self.checked else 1e9


async def ask(
    swarm: Swarm, question: str, checked: str, temperature: float = 0.0, route: Sequence[str] = (A, B, C)
) -> None:
    """And wait for the check of that node."""
    checker = swarm[A].pipelines._checker
    checker.trust, checker._budget = Trusting(swarm[A].trust, checked), Budget(1.0)
    before = swarm[A].pipelines.statistics()
    prompt = Prompt(messages=[{"role": "user", "content": question}])
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(
            prompt,
            swarm.entry,
            Sampling(temperature=temperature, seed=5, max_tokens=24, logprobs=True, top_logprobs=5),
        ) as generation:
            assert [piece async for piece in generation]
            assert [stage.node_id for stage in generation.route] == [*route]
        while True:
            counts = swarm[A].pipelines.statistics()
            if counts.checked + counts.checks_dropped > before.checked + before.checks_dropped:
                return
            await trio.sleep(0.05)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_honest_workers_are_right_to_the_bit(
    temperature: float, tmp_path: Path, entry: CatalogueEntry
) -> None:
    async with guide_swarm(tmp_path, entry, entry.path) as swarm:
        for question in QUESTIONS:
            await ask(swarm, question, B, temperature)
            await ask(swarm, question + "?", C, temperature)
        # The second time, most of its rows are those of the first request.
        for _ in range(2):
            await ask(swarm, LONG_QUESTION, C, temperature)
        for node_id, n_checked in ((B, 3), (C, 5)):
            explained = swarm[A].trust.explain(node_id)
            assert explained.counts == {"served": 8, "checked": n_checked}
            details = {entry.detail for entry in explained.recent if entry.trust_event is TrustEvent.CHECKED}
            assert details == {"equal bits"}
        await swarm.quiet()


@pytest.mark.parametrize(
    ("victim", "asked", "event"),
    [(B, M, TrustEvent.CHECKED), (B, C, None), (C, D, TrustEvent.CHECKED)],
    ids=["in its place", "after it", "the last one"],
)
async def test_what_was_computed_again_for_a_broken_pipeline_is_right(
    victim: NodeId, asked: NodeId, event: TrustEvent | None, tmp_path: Path, entry: CatalogueEntry
) -> None:
    """B, which dies, sent rows of other weights to C: neither C nor who takes B's place answers for them."""
    weights = quantised(tmp_path, llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0) if victim == B else entry.path
    async with guide_swarm(tmp_path, entry, weights) as swarm:
        await swarm.tell(A, {M: computes(entry.model_id, 5.0)})
        # C may be drawn in the first pipeline too, which is never complete.
        swarm[A].pipelines._checker.trust = Trusting(swarm[A].trust, asked)
        sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
        prompt = Prompt(messages=[{"role": "user", "content": QUESTIONS[1]}])
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(prompt, entry, sampling) as generation:
                async for piece in generation:
                    if piece.index == 6:
                        (worker,) = swarm[victim].pool.statistics()
                        os.kill(worker.pid, signal.SIGKILL)
            assert (generation.n_rebuilt, generation.n_generated) == (1, 24)
            counts = swarm[A].pipelines.statistics()
            while not counts.checked + counts.checks_dropped:
                await trio.sleep(0.05)
                counts = swarm[A].pipelines.statistics()
        assert (counts.checked, counts.checks_dropped) == ((1, 0) if event else (0, 1))
        assert (counts.checks_wrong, counts.checks_disputed) == (0, 0)
        assert event is None or swarm[A].trust.count(asked, event) == 1
        assert all(swarm[A].trust.score(each) >= NEUTRAL for each in HOLDINGS if each not in (A, victim))
        await swarm.quiet()


def quantised(folder: Path, kind: int) -> Path:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.pure = kind, True, True
    made = folder / "coarse.gguf"
    paths = str(GUIDE_PATH).encode(), str(made).encode()
    assert llama_cpp.llama_model_quantize(*paths, ctypes.byref(options)) == 0
    return made


@pytest.mark.parametrize(
    ("name", "question"),
    [("Q4_0", LONG_QUESTION), ("Q6_K", LONG_QUESTION), ("Q6_K", QUESTIONS[0])],
    ids=["Q4_0", "Q6_K", "Q6_K-short"],
)
async def test_coarser_weights_of_the_same_model_are_wrong(
    name: str, question: str, tmp_path: Path, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a stage that announces another type of KV. Six bits are close to the limit: not every
    stretch that is drawn shows them. Of a short prompt, who computes it again does so as of an exact request
    the second time, because other batches show nothing."""
    monkeypatch.setattr(checker, "ANNOUNCEMENT_S", 0.0)
    kind = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K}[name]
    async with guide_swarm(tmp_path, entry, quantised(tmp_path, kind)) as swarm:
        await announced(swarm, {B: "q8_0", M: "f16", N: "f16"})
        for _ in range(1 if name == "Q4_0" else 8):
            await ask(swarm, question, B)
            if swarm[A].trust.count(B, TrustEvent.WRONG_RESULT):
                break
        assert swarm[A].trust.count(B, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (C, M, N))


@pytest.mark.parametrize("question", [QUESTIONS[0], LONG_QUESTION], ids=["short", "long"])
@pytest.mark.parametrize(("name", "temperature"), [("Q4_0", 0.0), ("Q6_K", 0.0), ("Q6_K", 1.0)])
async def test_coarser_weights_of_a_last_stage_are_wrong(
    name: str,
    temperature: float,
    question: str,
    tmp_path: Path,
    entry: CatalogueEntry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its logits: nearly all of its tokens are those that the true weights give."""
    monkeypatch.setattr(checker, "ANNOUNCEMENT_S", 0.0)
    kind = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K}[name]
    coarse = quantised(tmp_path, kind)
    async with guide_swarm(tmp_path, entry, entry.path, weights_of_c=coarse, origin_has=(C,)) as swarm:
        swarm[A].pipelines._observations.observe(entry.model_id, "decode", 100.0, 1, 1)
        await announced(swarm, {C: "f16", D: "f16"})
        for turn in range(6):
            await ask(swarm, f"{turn} {question}", C, temperature)
            if swarm[A].trust.count(C, TrustEvent.WRONG_RESULT):
                break
        assert swarm[A].trust.count(C, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, D, M, N))


async def test_coarser_weights_of_a_whole_model_elsewhere_are_wrong_by_two_others(
    tmp_path: Path, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "ANNOUNCEMENT_S", 0.0)
    coarse = quantised(tmp_path, llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K)
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id in (A, B, C, D):
            settings = WorkerSettings(
                cache_dir=tmp_path / f"cache-{node_id}", kernel_timings=KERNEL_TIMINGS, n_ctx=1024, n_slots=4
            )
            pools[node_id] = WorkerPool(settings, tmp_path / f"run-{len(pools)}")
            await stack.enter_async_context(pools[node_id].running())
            if node_id != A:
                model = ModelFile(entry.model_id, coarse if node_id == B else entry.path)
                await pools[node_id].load(model, LayerRange(0, 12))
        settings = PipelineSettings(n_ctx=1024, check_rate=0.2, hedge=0.0)
        swarm = await stack.enter_async_context(open_swarm(pools, settings=settings, entry=entry))
        await swarm.tell(A, {node_id: computes(entry.model_id, 10.0) for node_id in (C, D)})
        await swarm.tell(A, {B: computes(entry.model_id, 1e-4)})
        await announced(swarm, {B: "f16", C: "f16", D: "f16"})
        for question in QUESTIONS * 2:
            await ask(swarm, question, B, route=[B])
            if swarm[A].trust.count(B, TrustEvent.WRONG_RESULT):
                break
        assert swarm[A].trust.count(B, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (C, D))


@pytest.mark.parametrize(
    ("announces", "event"),
    [("f16", TrustEvent.WRONG_RESULT), ("q8_0", TrustEvent.CHECKED)],
    ids=["like them", "unlike"],
)
async def test_noise_of_one_percent_is_wrong_by_the_limit_of_one_class(
    announces: str, event: TrustEvent, tmp_path: Path, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that compute it again announce f16. Honest rows beside other requests are off by half as much."""
    monkeypatch.setattr(checker, "ANNOUNCEMENT_S", 0.0)
    async with guide_swarm(tmp_path, entry, entry.path, 0.01) as swarm:
        await announced(swarm, {B: announces, M: "f16", N: "f16"})
        await ask(swarm, LONG_QUESTION, B)
        assert swarm[A].trust.count(B, event) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (C, M, N))


@dataclass
class OtherBeginning:
    """Has a worker take what it keeps of an earlier prompt for the beginning of another one."""

    lies: bool = False
    _names: list[bytes] = field(default_factory=list)

    def install(self, pool: WorkerPool) -> None:
        name_prefix = pool.name_prefix

        async def named(model: ModelFile, **call: Any) -> int:
            if self.lies:
                return int(await name_prefix(model, **call | {"names": self._names[-1]}))
            self._names.append(call["names"])
            return int(await name_prefix(model, **call))

        vars(pool)["name_prefix"] = named


async def test_who_uses_kept_kv_of_another_prompt_is_wrong(tmp_path: Path, entry: CatalogueEntry) -> None:
    """B computes every row as it should, and only what it takes for the beginning is another prompt's."""
    liar = OtherBeginning()
    async with guide_swarm(tmp_path, entry, entry.path, change_b=liar.install) as swarm:
        await ask(swarm, LONG_QUESTION, B)
        await ask(swarm, LONG_QUESTION.replace("8", "9"), B)
        assert swarm[A].trust.count(B, TrustEvent.CHECKED) == 2
        liar.lies = True
        for _ in range(6):  # One token is another one, which some rows show less than others.
            await ask(swarm, LONG_QUESTION, B)
            if swarm[A].trust.count(B, TrustEvent.WRONG_RESULT):
                break
        assert swarm[A].trust.count(B, TrustEvent.WRONG_RESULT) == 1


@pytest.mark.parametrize(
    ("own", "of_b", "announces", "noise", "event"),
    [
        ("f16", "q8_0", "q8_0", 0.0, TrustEvent.CHECKED),
        ("f16", "f16", "q8_0", 0.01, TrustEvent.WRONG_RESULT),
        ("q8_0", "q8_0", "q8_0", 0.01, TrustEvent.WRONG_RESULT),
    ],
    ids=["honest", "says another one", "of rows that are alike in all batches"],
)
async def test_a_type_of_kv_that_is_announced_hides_no_noise_from_who_has_the_layers(
    own: KvType,
    of_b: KvType,
    announces: KvType,
    noise: float,
    event: TrustEvent,
    tmp_path: Path,
    entry: CatalogueEntry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not noise:  # Only rows of its own type are as near as that.
        monkeypatch.setattr(checker, "SAME_KV", Limits(least=0.005, of_spread=0.1))
    kinds: dict[NodeId, KvType] = {A: own, B: of_b}
    async with guide_swarm(tmp_path, entry, entry.path, noise, origin_has=(B,), kv_types=kinds) as swarm:
        await announced(swarm, {A: own, B: announces})
        await ask(swarm, LONG_QUESTION, B)
        assert swarm[A].trust.count(B, event) == 1


def lies_steadily(pool: WorkerPool, part: float) -> None:
    """Noise on all rows that it sends, and it says later that it sent these."""
    forward, read_journal, drawn = pool.forward, pool.read_journal, np.random.default_rng(2)
    sent: dict[int, Any] = {}

    async def noisily(model: ModelFile, **call: Any) -> Any:
        result = await forward(model, **call)
        noise = 1 + part * drawn.standard_normal(result.tensor.shape)
        rows = (result.tensor * noise).astype(np.float32)
        sent.update({call["position"] + at: row for at, row in enumerate(rows)})
        return replace(result, tensor=rows)

    async def say_so(model: ModelFile, **call: Any) -> Any:
        if call["end"] != LayerRange.parse(HOLDINGS[B]).end:
            return await read_journal(model, **call)
        return np.stack([sent[call["position"] + at] for at in range(call["n_rows"])])

    vars(pool).update(forward=noisily, read_journal=say_so)


async def announced(swarm: Swarm, kv_types: dict[NodeId, str]) -> None:
    known = swarm[A].registry
    with trio.fail_after(DEADLINE_S):
        for node_id, kv_type in kv_types.items():
            # It repeats what it knows of itself, which may come later than what A knows of it.
            while _capability(swarm[node_id].registry, node_id) != _capability(known, node_id):
                await trio.lowlevel.checkpoint()
            await swarm[node_id].announce_kv(kv_type)
        while any(known.nodes()[node_id].models[0].kv_type != kv_types[node_id] for node_id in kv_types):
            await trio.lowlevel.checkpoint()


def _capability(registry: Registry, node_id: NodeId) -> NodeCapability | None:
    record = registry.node(node_id)
    return None if record is None else record.capability
