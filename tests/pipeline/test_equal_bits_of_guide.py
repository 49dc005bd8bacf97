"""Exact requests of the bundled model, computed again by real workers: honest rows and tokens have equal bits
whatever else runs there, and noise that no tolerance shows is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from deadlines import DEADLINE_S
from kernel_timings import KERNEL_TIMINGS

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import KvType, Sampling

from .fakes import Swarm, computes, open_swarm
from .test_checks_of_guide import Trusting, lies_steadily

if TYPE_CHECKING:
    from trio_typing import TaskStatus

pytestmark = [pytest.mark.slow, pytest.mark.long]

A, B, C, D, M, N = (node_id_named(name) for name in "abcdmn")
CUT = {A: "0:4", B: "4:8", M: "4:8", N: "4:8", C: "8:12", D: "8:12"}
KNOWING = {A: "0:4", B: "4:8", C: "8:12"}
WHOLE = {A: "", N: "", B: "0:12", D: "0:12", M: "0:12"}
TEXT = "Which node computes layers 4 to 8, and what does it get from the one before it? "
PLAIN = Sampling(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@asynccontextmanager
async def swarm_of(
    folder: Path,
    entry: CatalogueEntry,
    held: Mapping[NodeId, str],
    *,
    noise_of_b: float = 0.0,
    kv_type: KvType = "f16",
) -> AsyncIterator[Swarm]:
    """B and C are faster than the others, and get the work."""
    async with AsyncExitStack() as stack:
        pools: dict[str, WorkerPool] = {}
        for node_id, layers in held.items():
            settings = WorkerSettings(
                cache_dir=folder / f"cache-{len(pools)}",
                kernel_timings=KERNEL_TIMINGS,
                n_ctx=2048,
                n_slots=12,
                n_threads=1 + len(pools) % 2,
                kv_type=kv_type,
            )
            pools[node_id] = WorkerPool(settings, folder / f"run-{len(pools)}")
            await stack.enter_async_context(pools[node_id].running())
            if layers:
                model = ModelFile(entry.model_id, entry.path)
                await pools[node_id].load(model, LayerRange.parse(layers))
        if noise_of_b:
            lies_steadily(pools[B], noise_of_b)
        settings = PipelineSettings(prefill_chunk_tokens=100, n_ctx=2048, check_rate=0.2)
        swarm = await stack.enter_async_context(open_swarm(pools, settings=settings, entry=entry))
        slow = {node_id: computes(entry.model_id, 10.0) for node_id in (A, D, M, N) if node_id in held}
        await swarm.tell(A, slow)
        fast = {node_id: computes(entry.model_id, 1e-4) for node_id in (B, C) if node_id in held}
        await swarm.tell(A, fast)
        yield swarm


async def ask(
    swarm: Swarm, text: str, checked: NodeId, sampling: Sampling, *, loads: str = ""
) -> list[NodeId]:
    """The nodes of the route, after the check of that node. `loads`: what the origin loads meanwhile."""
    swarm[A].pipelines._checker.trust = Trusting(swarm[A].trust, checked)
    before = swarm[A].pipelines.statistics()
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(Prompt(text=text), swarm.entry, sampling) as generation:
            assert [piece async for piece in generation]
            assert generation.is_apart
            if loads:
                model = ModelFile(swarm.entry.model_id, swarm.entry.path)
                await swarm[A].pool.load(model, LayerRange.parse(loads))
            route = [stage.node_id for stage in generation.route]
        while True:
            counts = swarm[A].pipelines.statistics()
            if counts.checked + counts.checks_dropped > before.checked + before.checks_dropped:
                assert counts.checks_dropped == before.checks_dropped
                return route
            await trio.sleep(0.05)


async def others_ask(swarm: Swarm, asker: NodeId, *, task_status: TaskStatus[None]) -> None:
    """Plain requests, one after the other, whose beginnings are kept and used again."""
    index = 0
    while True:
        index += 1
        text = TEXT * (1 + index % 3) + "again " * index
        async with swarm[asker].pipelines.generate(Prompt(text=text), swarm.entry, PLAIN) as generation:
            assert [piece async for piece in generation]
        if index == 2:
            task_status.started()


@pytest.mark.parametrize(
    ("held", "checked", "kv_type"),
    [(CUT, B, "q8_0"), (CUT, C, "f16"), (WHOLE, B, "q8_0")],
    ids=["the middle", "the last", "the whole"],
)
async def test_honest_nodes_have_equal_bits_beside_other_requests(
    held: dict[NodeId, str], checked: NodeId, kv_type: KvType, tmp_path: Path, entry: CatalogueEntry
) -> None:
    async with swarm_of(tmp_path, entry, held, kv_type=kv_type) as swarm, trio.open_nursery() as nursery:
        swarm[N].pipelines._checker.chance = lambda: 0.999  # It draws nothing.
        await nursery.start(others_ask, swarm, N)
        for length, temperature in ((1, 0.0), (7, 1.0)):
            asked = {"temperature": temperature, "seed": 5, "logprobs": True, "top_logprobs": 5}
            sampling = Sampling(max_tokens=48, ignore_eos=True, exact=True, **asked)
            await ask(swarm, TEXT * length, checked, sampling)
        nursery.cancel_scope.cancel()
        explained = swarm[A].trust.explain(checked)
        details = [each.detail for each in explained.recent if each.trust_event is TrustEvent.CHECKED]
        assert details == ["equal bits"] * 2
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in held)


@pytest.mark.parametrize("held", [CUT, KNOWING], ids=["by two others", "by the origin"])
async def test_noise_of_a_thousandth_is_wrong(
    held: dict[NodeId, str], tmp_path: Path, entry: CatalogueEntry
) -> None:
    """The same noise in a request that is not exact is within what honest rows differ by."""
    async with swarm_of(tmp_path, entry, held, noise_of_b=0.001) as swarm:
        sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, exact=True)
        loads = "4:8" if held == KNOWING else ""
        assert B in await ask(swarm, TEXT * 3, B, sampling, loads=loads)
        assert swarm[A].trust.count(B, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in held if node_id != B)
