"""A projector from another node whose bytes are what it announces, and that ends whoever opens it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from node_ids import A, node_id_named
from vision_models import picture, projector, text_model

from swarmllm.errors import BadModel, Conflict
from swarmllm.models.projector_store import ProjectorStore
from swarmllm.node.projectors import ProjectorKeeper
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings

from .transfer_nodes import Node, World, open_world

pytestmark = pytest.mark.slow

TAKER = node_id_named("taker")
N_EMBD = 64


@asynccontextmanager
async def keeper_of(taker: Node) -> AsyncIterator[tuple[ProjectorKeeper, WorkerPool]]:
    pool = WorkerPool(WorkerSettings(cache_dir=taker.home / "cache"), taker.home / "run")
    store = ProjectorStore(taker.home / "projectors")
    async with pool.running():
        yield ProjectorKeeper(taker.store.catalogue, pool, taker.transfer, store), pool


async def giving(world: World, made: Path) -> Node:
    giver = await world.node(A)
    model = await trio.Path(text_model(made.parent, "llama")).read_bytes()
    await trio.to_thread.run_sync(giver.add, model)
    await trio.to_thread.run_sync(giver.attach, await trio.Path(made).read_bytes())
    await world.settle()
    return giver


def unseen(done_bytes: int, total_bytes: int) -> None:
    """Nobody watches this progress."""


@pytest.mark.parametrize("gone", ["v.blk.0.attn_q.weight", "v.patch_embd.weight"])
async def test_a_hostile_file_costs_its_process_and_itself_and_is_not_fetched_again(
    tmp_path: Path, gone: str
) -> None:
    made = projector(tmp_path / "hostile.gguf", "janus_pro", N_EMBD, without=[gone])
    async with open_world(tmp_path) as world:
        giver = await giving(world, made)
        taker = await world.node(TAKER)
        entry = await taker.transfer.find("tiny")
        async with keeper_of(taker) as (keeper, _):
            with pytest.raises(BadModel):
                await keeper.load(entry, unseen)
            now = await trio.to_thread.run_sync(taker.store.catalogue.get, "tiny")
            assert (now.projector, now.unloaded_projector) == (None, None)
            assert list((taker.home / "projectors").iterdir()) == []
            n_asked = giver.n_asked
            with pytest.raises(BadModel):
                await keeper.load(entry, unseen)
            assert giver.n_asked == n_asked
            with pytest.raises(Conflict, match="no projector of tiny is loaded"):
                await keeper.unload(now)


async def test_one_that_is_good_is_kept_open_and_goes_with_its_model(tmp_path: Path) -> None:
    made = projector(tmp_path / "good.gguf", "janus_pro", N_EMBD)
    async with open_world(tmp_path) as world:
        await giving(world, made)
        taker = await world.node(TAKER)
        entry = await taker.transfer.find("tiny")
        async with keeper_of(taker) as (keeper, pool):
            told: list[tuple[int, int]] = []
            entry = await keeper.load(entry, lambda done, total: told.append((done, total)))
            size = made.stat().st_size
            assert told[-1] == (size, size)
            attached = entry.projector
            assert attached is not None
            assert entry.projector_state == "loaded"
            assert pool.is_projector_open(entry.model_id, attached)
            rows = (await pool.encode_picture(ModelFile.of(entry), attached, picture(40, 30))).rows
            assert len(rows) == 16
            # Idle ones are ended, but for those that were loaded.
            pool._hosts.settings = replace(pool._hosts.settings, idle_timeout_s=0.0)
            workers = pool._encoders._workers
            await workers._stop_idle()
            assert pool.is_projector_open(entry.model_id, attached)
            workers.kept_open.clear()
            await workers._stop_idle()
            assert not pool.is_projector_open(entry.model_id, attached)
            await keeper.load(entry, unseen)
            assert pool.is_projector_open(entry.model_id, attached)
            entry = await keeper.unload(entry)
            assert (entry.projector, entry.unloaded_projector) == (None, attached)
            assert not pool.is_projector_open(entry.model_id, attached)
            assert (await keeper.load(entry, unseen)).projector == attached
        # Another daemon with the same data opens it again.
        async with keeper_of(taker) as (keeper, pool):
            await keeper.restore()
            assert pool.is_projector_open(entry.model_id, attached)
            await taker.transfer.remove(entry)
            await keeper.tidy()
            assert list((taker.home / "projectors").iterdir()) == []
