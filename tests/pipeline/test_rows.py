"""States after the final norm, from one node and over several, against libllama on the uncut file."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import trio
from node_ids import A, B, C

from swarmllm.errors import ContextFull, RemoteError
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.prompt_rows import RowsChain
from swarmllm.pipeline.request import RequestContext
from swarmllm.workerpool import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PrefillProgress, Stage
from swarmllm_proto.tensors import encode_tensor

from .test_guide_over_nodes import THIRDS, guide_swarm

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(3).integers(300, 2000, 200).astype(np.int32)
"""More than a chunk of 16, and more than the rows of which a head gives something at once."""


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> CatalogueEntry:
    return Catalogue(tmp_path_factory.mktemp("catalogue") / "models.sqlite").ensure(GUIDE_PATH, "guide")


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    llama = llama_cpp.Llama(
        str(GUIDE_PATH),
        n_ctx=1024,
        n_threads=1,
        embedding=True,
        pooling_type=0,
        flash_attn=True,
        verbose=False,
    )
    try:
        llama.reset()
        llama._ctx.kv_cache_clear()
        found = []
        # A worker gives few such rows at a time, and fused attention has another way of many.
        for start in range(0, len(TOKENS), 16):
            piece = TOKENS[start : start + 16].tolist()
            llama.eval(piece)
            pointer = llama_cpp.llama_get_embeddings(llama._ctx.ctx)
            found.append(np.ctypeslib.as_array(pointer, (len(piece), llama.n_embd())).copy())
        return np.concatenate(found)
    finally:
        llama.close()


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per row. Batches of another size are summed in another order; from random tokens libllama makes 0.9995
    of that when it is asked for one at a time."""
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


@pytest.mark.parametrize(
    "holdings",
    [{A: "0:12"}, THIRDS, {A: "", B: "0:12"}, {A: "6:12", B: "0:6"}],
    ids=["here", "three nodes", "elsewhere", "turned round"],
)
async def test_rows_are_those_of_the_uncut_model(
    tmp_path: Path, entry: CatalogueEntry, expected: np.ndarray, holdings: dict[str, str]
) -> None:
    async with guide_swarm(tmp_path, entry, holdings, n_slots=2) as swarm:
        for _ in range(3):  # more often than there are slots: one that was kept would be missed
            rows = await swarm[A].pipelines.rows(TOKENS, entry)
            assert rows.values.shape == expected.shape
            # Chunks of another size are summed in another order.
            np.testing.assert_allclose(rows.values, expected, rtol=0, atol=2e-2)
            assert cosines(rows.values, expected).min() > 0.99999
        assert rows.stages[-1].end == 12
        await swarm.quiet()


async def test_tokens_and_rows_do_not_disturb_each_other(tmp_path: Path, entry: CatalogueEntry) -> None:
    """They share a worker, its segments and its batches' order, and never a batch."""
    greedy = Sampling(temperature=0.0, max_tokens=30)
    answers: list[list[int]] = []
    async with guide_swarm(tmp_path, entry, {A: "0:12"}) as swarm:

        async def ask() -> None:
            prompt = Prompt(messages=[{"role": "user", "content": "What is a pipeline?"}])
            async with swarm[A].pipelines.generate(prompt, entry, greedy) as generation:
                answers.append([piece.token async for piece in generation])

        await ask()
        alone = (await swarm[A].pipelines.rows(TOKENS, entry)).values
        together: list[np.ndarray] = []

        async def rows() -> None:
            together.append((await swarm[A].pipelines.rows(TOKENS, entry)).values)

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask)
                nursery.start_soon(rows)
    assert answers[1:] == answers[:1] * 2
    for values in together:
        assert cosines(values, alone).min() > 0.99


async def test_a_prompt_that_is_too_long_is_refused(tmp_path: Path, entry: CatalogueEntry) -> None:
    async with guide_swarm(tmp_path, entry, {A: "0:12"}) as swarm:
        with pytest.raises(ContextFull):
            await swarm[A].pipelines.rows(np.ones(5000, np.int32), entry)


async def test_a_lost_node_is_gone_round_once(tmp_path: Path, entry: CatalogueEntry) -> None:
    holdings = {A: "0:6", B: "6:12", C: "6:12"}
    async with guide_swarm(tmp_path, entry, holdings) as swarm:
        first = await swarm[A].pipelines.rows(TOKENS, entry)
        used = first.stages[1].node_id
        model = entry.model_id
        await swarm[used].pool.unload(model, LayerRange(6, 12))
        again = await swarm[A].pipelines.rows(TOKENS, entry)
        assert again.stages[1].node_id != used
        np.testing.assert_allclose(again.values, first.values, rtol=0, atol=2e-2)


class NobodyWaits:
    async def investigate(self, chain: Chain) -> None:
        raise AssertionError("nobody waits for this chain")

    def repeats(self, chain: RowsChain, position: int) -> None:
        pass


def a_chain() -> RowsChain:
    stages = (Stage(node_id=A, start=0, end=6), Stage(node_id=B, start=6, end=12))
    view = RequestView(A, A, stages, True)
    context = RequestContext("r", ModelFile("m", GUIDE_PATH), 4, 997, 8, Sampling(), view, wants="normed")
    return RowsChain(
        context,
        np.ones(8, np.int32),
        chunk_tokens=4,
        silence_timeout_s=1,
        look_after_s=5,
        stall_handler=NobodyWaits(),
        nicknames={A: "", B: ""},
    )


def started() -> RowsChain:
    """Both of its chunks are under way."""
    chain = a_chain()
    chain.start(type("Deaf", (), {"offer": lambda *_: None, "stop": lambda *_: None})())  # type: ignore[arg-type]
    assert chain.next_chunk()
    assert chain.next_chunk()
    return chain


@pytest.mark.parametrize(
    ("position", "payload"),
    [
        (4, b""),
        (4, b"nonsense"),
        (4, b"".join(encode_tensor(np.ones((4, 3), np.float32)))),
        (4, b"".join(encode_tensor(np.full((4, 4), np.nan, np.float32)))),
        (4, b"".join(encode_tensor(np.ones(4, np.int32)))),
        (8, b"".join(encode_tensor(np.ones((4, 4), np.float32)))),
        (3, b"".join(encode_tensor(np.ones((4, 4), np.float32)))),
    ],
)
async def test_rows_that_cannot_be_meant_end_the_request(position: int, payload: bytes) -> None:
    chain = started()
    chain.receive(B, PrefillProgress(request_id="r", position=position), payload)
    assert isinstance(chain.failure, RemoteError)
    assert chain.blamed.culprit == B


async def test_rows_that_can_be_meant_are_taken() -> None:
    chain = started()
    rows = b"".join(encode_tensor(np.ones((4, 4), np.float32)))
    chain.receive(B, PrefillProgress(request_id="r", position=4), rows)
    assert (chain.failure, chain.is_complete) == (None, False)
    chain.receive(B, PrefillProgress(request_id="r", position=8), rows)
    assert (await chain.all_rows()).shape == (8, 4)


def test_no_chunk_is_the_last() -> None:
    """The head would sample from it."""
    chain = a_chain()
    chain._is_feeding = True
    chain._session = type("Deaf", (), {"offer": lambda *_: None})()  # type: ignore[assignment]
    chunks = [chain.next_chunk(), chain.next_chunk()]
    assert [chunk.left > 0 for chunk in chunks if chunk] == [True, True]
