"""What may be fetched in order to be placed here: a budget, and what goes for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarmllm.errors import Conflict, ModelNotFound
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import CatalogueEntry, LayerRange, build_manifest, needed_tensors
from swarmllm.models.model_files import FileState
from swarmllm.node.placing.disk import PlacingDisk, missing_bytes, stored_bytes
from swarmllm.node.placing.share_book import ShareBook
from swarmllm_proto.identifiers import ModelId

MANIFEST = build_manifest(GUIDE_PATH)
ALL_BYTES = sum(tensor.size_bytes for tensor in MANIFEST.tensors)


def entry(n: int, layers: LayerRange | None = None, *, stored: bool = True) -> CatalogueEntry:
    """A model of its own id, of which so much was fetched."""
    present = frozenset(tensor.name for tensor in needed_tensors(MANIFEST, layers)) if layers else frozenset()
    return CatalogueEntry(
        ModelId(f"{n:064x}"),
        f"m{n}",
        Path("/nowhere"),
        MANIFEST,
        FileState(1, 1),
        present if stored else None,
    )


class Disk:
    """A catalogue in memory, and what is placed from it."""

    def __init__(self, budget_bytes: int, *entries: CatalogueEntry, in_use: tuple[int, ...] = ()) -> None:
        self.entries = {each.model_id: each for each in entries}
        self.book = ShareBook()
        self.removed: list[str] = []
        self._in_use = {ModelId(f"{n:064x}") for n in in_use}
        self.placing = PlacingDisk(budget_bytes, self.book, self)

    async def known(self, model_id: ModelId) -> CatalogueEntry:
        if model_id not in self.entries:
            raise ModelNotFound("no such model")
        return self.entries[model_id]

    async def remove(self, name_or_id: str) -> None:
        model_id = ModelId(name_or_id)
        if model_id in self._in_use:
            raise Conflict("it is loaded")
        self.removed.append(self.entries.pop(model_id).name)

    def fetched(self, *numbers: int) -> None:
        self.book.fetched |= dict.fromkeys(ModelId(f"{n:064x}") for n in numbers)


WHOLE = LayerRange(0, MANIFEST.n_layers)
HALF = LayerRange(0, 6)
NEEDED = missing_bytes(entry(1), WHOLE)


async def test_what_was_fetched_for_shares_counts_and_what_its_user_has_does_not() -> None:
    disk = Disk(10 * ALL_BYTES, entry(1, HALF), entry(2, HALF), entry(3, stored=False))
    disk.fetched(1)
    await disk.placing.look()
    assert disk.placing.free_bytes == 10 * ALL_BYTES - stored_bytes(entry(1, HALF))
    assert 0 < stored_bytes(entry(1, HALF)) < ALL_BYTES
    assert missing_bytes(entry(3, stored=False), WHOLE) == stored_bytes(entry(3, stored=False)) == 0


async def test_the_oldest_that_are_not_placed_go_for_one_that_is_wanted() -> None:
    disk = Disk(int(2.6 * NEEDED), entry(1, WHOLE), entry(2, WHOLE), entry(3), in_use=(1,))
    disk.fetched(1, 2)
    assert await disk.placing.make_room(entry(3), WHOLE, keep=())
    assert disk.removed == ["m2"]
    assert list(disk.book.fetched) == [entry(1).model_id]


async def test_nothing_goes_that_is_kept_and_then_there_is_no_room() -> None:
    disk = Disk(int(1.5 * NEEDED), entry(1, WHOLE), replace(entry(2, HALF), pinned=True), entry(3))
    disk.fetched(1, 2)
    assert not await disk.placing.make_room(entry(3), WHOLE, keep=[entry(1).model_id])
    assert disk.removed == []


async def test_bytes_that_are_on_their_way_count() -> None:
    disk = Disk(int(1.5 * NEEDED), entry(1), entry(2))
    with disk.placing.arriving(entry(1), WHOLE):
        assert disk.placing.free_bytes == int(1.5 * NEEDED) - NEEDED
        assert not await disk.placing.make_room(entry(2), WHOLE, keep=())
    assert await disk.placing.make_room(entry(2), WHOLE, keep=())


async def test_only_what_is_fetched_from_its_beginning_is_charged() -> None:
    disk = Disk(ALL_BYTES)
    for each in (entry(1), entry(2, HALF), entry(3, stored=False)):
        await disk.placing.begin(each)
    assert list(disk.book.fetched) == [entry(1).model_id]
    disk.placing.belongs_to_user(entry(1).model_id)
    assert not disk.book.fetched


@pytest.mark.parametrize(
    ("known", "removed"),
    [(entry(1), ["m1"]), (entry(1, HALF), []), (entry(1, stored=False), [])],
    ids=["never begun", "partly there", "its user's"],
)
async def test_at_the_end_of_a_share_only_what_was_never_begun_goes_at_once(
    known: CatalogueEntry, removed: list[str]
) -> None:
    disk = Disk(ALL_BYTES, known)
    disk.fetched(1)
    await disk.placing.end(known.model_id)
    assert disk.removed == removed
    await disk.placing.end(ModelId("f" * 64))
