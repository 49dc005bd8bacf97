"""Other nodes hear of a model that has just come when its cuts were tried, and not before."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import trio
from msgspec import UNSET
from node_ids import A
from placing_members import ENTRY

from swarmllm.errors import WorkerError
from swarmllm.models import CatalogueEntry
from swarmllm.models.manifest import Manifest
from swarmllm.node.announcing.announcer import Announcer
from swarmllm.node.model_keeper import ModelKeeper
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool.cut_check import CutVerdict
from swarmllm_proto.swarm import FileAnnounce, NodeCapability


class OneModel:
    """A catalogue, a worker pool that holds nothing and whose trial waits until it may end, and a node."""

    model_ids = ()
    shares = shared = fetched = UNSET
    gives = False

    def __init__(self) -> None:
        self.entry = ENTRY
        self.cuts, self.tries_listed = self, True
        self.begun, self.may_end = trio.Event(), trio.Event()
        self.fails = False
        self.node_id = A
        self.n_published = 0

    def models(self) -> dict[str, object]:
        return {}

    def kept_prefixes(self) -> dict[str, object]:
        return {}

    def list(self) -> tuple[object, ...]:
        return (self.entry,)

    def get(self, _model_id: str) -> CatalogueEntry:
        return self.entry

    def revise(self, _model_id: str, manifest: Manifest) -> CatalogueEntry:
        assert msgspec.structs.replace(manifest, cuts_checked_with="") == ENTRY.manifest
        return self.entry

    async def check(self, _model: object, _progress: object) -> CutVerdict:
        self.begun.set()
        await self.may_end.wait()
        if self.fails:
            raise WorkerError("there is no memory for it now")
        return CutVerdict(1)

    def announcements(self, entries: Any) -> tuple[FileAnnounce, ...]:
        return tuple(
            FileAnnounce(model_id=each.model_id, name=each.name, n_layers=each.manifest.n_layers)
            for each in entries
        )

    async def publish(self) -> None:
        self.n_published += 1


@pytest.mark.parametrize("ends", ["with a verdict", "with an error", "by leaving"])
async def test_a_file_is_announced_when_its_trial_is_over_however_it_ends(ends: str) -> None:
    one = OneModel()
    one.fails = ends == "with an error"
    every = cast(Any, one)
    keeper = ModelKeeper(every, every, every, every, every, every, every, every, every)
    announcer = Announcer(
        "a",
        router=every,
        registry=Registry(A),
        pool=every,
        catalogue=every,
        transfer=every,
        observations=Observations(),
        describe=NodeCapability,
        placing=every,
        files=every,
        models=keeper,
    )

    async def announced() -> list[str]:
        _, files, *_ = await announcer._holdings()
        return [each.model_id for each in files]

    assert await announced() == [ENTRY.model_id]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.try_cuts, ENTRY)
        await one.begun.wait()
        assert await announced() == []
        if ends == "by leaving":
            nursery.cancel_scope.cancel()
        one.may_end.set()
    assert await announced() == [ENTRY.model_id]
    assert one.n_published == (0 if ends == "by leaving" else 1)
