"""The disk becomes full at some moment: that is said, what was there stays, and it goes on later."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from node_ids import A, node_id_named
from small_disk import small_disk

from swarmllm.errors import StoreFull
from swarmllm.models import Catalogue, LayerRange, Store

from .transfer_nodes import MODEL, SETTINGS, TENSOR_BYTES, open_world

TAKER = node_id_named("taker")


async def test_a_disk_that_fills_up_on_the_way(tmp_path: Path) -> None:
    dice = random.Random(12)
    with small_disk(tmp_path / TAKER, 3 * len(MODEL)) as disk:
        async with open_world(tmp_path) as world:
            await world.node(A, has_model=True)
            # One lane, so that what is missing is known whenever progress is told.
            taker = await world.node(TAKER, settings=replace(SETTINGS, lanes_per_holder=1))
            for round_no in range(4):
                fill_at, leave_bytes = 0.7 * dice.random(), dice.choice([0, 0, 8192, TENSOR_BYTES])
                is_full = False

                def fill(
                    done: int, total: int, fill_at: float = fill_at, leave_bytes: int = leave_bytes
                ) -> None:
                    nonlocal is_full
                    if not is_full and done >= fill_at * total:
                        disk.fill(min(leave_bytes, (total - done) // 2))
                        is_full = True

                with pytest.raises(StoreFull):
                    await taker.get(progress=fill)
                entry = taker.store.catalogue.get("tiny")
                assert taker.store.verify(entry, lambda done, total: None) == (), f"round {round_no}"
                assert len(entry.absent(entry.manifest.tensors)) > 0
                disk.free()
                assert taker.store.sweep() == 0
            entry = await taker.get()
            assert entry.path.read_bytes() == MODEL
            assert taker.store.verify(entry, lambda done, total: None) == ()
            fetched = taker.transfer.statistics().fetched_bytes
            assert fetched < 2 * len(MODEL), "what had arrived was not fetched again"


async def test_a_disk_that_is_full_before_anything_is_known(tmp_path: Path) -> None:
    with small_disk(tmp_path / TAKER, 3 * len(MODEL)) as disk:
        async with open_world(tmp_path) as world:
            await world.node(A, has_model=True)
            taker = await world.node(TAKER)
            for leave_bytes in (0, 4096, 16 * 1024):
                disk.fill(leave_bytes)
                with pytest.raises(StoreFull):
                    await taker.get()
                disk.free()
                assert taker.store.sweep() == 0, "nothing half done is left"
                for entry in taker.store.catalogue.list():
                    assert taker.store.verify(entry, lambda done, total: None) == ()
            assert (await taker.get()).path.read_bytes() == MODEL


async def test_a_file_added_while_the_catalogue_cannot_grow(tmp_path: Path) -> None:
    with small_disk(tmp_path / TAKER, 3 * len(MODEL)) as disk:
        async with open_world(tmp_path) as world:
            node = await world.node(TAKER)
            path = tmp_path / "mine.gguf"
            path.write_bytes(MODEL)
            disk.fill()
            with pytest.raises(StoreFull, match="catalogue"):
                node.store.catalogue.add(path, "mine")
            assert node.store.catalogue.list() == ()
            disk.free()
            entry = node.store.catalogue.add(path, "mine")
            assert node.store.verify(entry, lambda done, total: None) == ()


async def test_a_model_is_removed_from_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / TAKER, 3 * len(MODEL)) as disk:
        async with open_world(tmp_path) as world:
            await world.node(A, has_model=True)
            taker = await world.node(TAKER)
            entry = await taker.get()
            disk.fill()
            again = Store(Catalogue(taker.home / "catalogue.sqlite"), taker.home / "models")
            assert again.sweep() == 0, "a node starts on a full disk"
            again.remove(entry)
            assert again.catalogue.list() == ()
            assert not entry.path.exists()


async def test_a_downloaded_file_outlasts_a_disk_without_room_for_its_entry(tmp_path: Path) -> None:
    with small_disk(tmp_path / TAKER, 4 * len(MODEL)) as disk:
        async with open_world(tmp_path) as world:
            await world.node(A, has_model=True)
            taker = await world.node(TAKER)
            part_of_it = await taker.get(LayerRange(0, 1))
            download = taker.home / "download.gguf"
            download.write_bytes(MODEL)
            for leave_bytes in (0, 4096, 16 * 1024):
                disk.fill(leave_bytes)
                with pytest.raises(StoreFull):
                    taker.store.take_in(download, "tiny")
                assert download.read_bytes() == MODEL
                assert taker.store.catalogue.get("tiny").present == part_of_it.present
                assert taker.store.verify(part_of_it, lambda done, total: None) == ()
                disk.free()
                assert taker.store.sweep() == 0
            entry = taker.store.take_in(download, "tiny")
            assert not download.exists()
            assert entry.path.read_bytes() == MODEL
            assert taker.store.verify(entry, lambda done, total: None) == ()
