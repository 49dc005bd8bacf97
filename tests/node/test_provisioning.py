"""How a model that a request asks for is brought to where it can run, and what is said of that meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from placing_members import ENTRY

from swarmllm.errors import Conflict, NodeUnreachable
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import CatalogueEntry, LayerRange, build_manifest
from swarmllm.node.model_access import Sources, unseen
from swarmllm.node.placing.plan import shape_of
from swarmllm.node.provisioning import ModelProvisioner
from swarmllm.node.sharing.sharing import Sharing
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions, WorkerPool

NEEDED = shape_of(ENTRY.manifest).n_bytes(ENTRY.manifest.whole)


@dataclass
class World:
    said: list[str] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    n_ready: int = 0
    free: int | None = None
    refuses: bool = False
    provisioner: ModelProvisioner = field(init=False)

    def __post_init__(self) -> None:
        self.provisioner = ModelProvisioner(self, cast(WorkerPool, self), cast(Sharing, self))

    def free_bytes(self) -> int | None:
        return self.free

    def is_complete(self, entry: CatalogueEntry) -> bool:
        return self.n_ready == 12

    def has_givers(self, model_id: str) -> bool:
        return False

    async def find(self, name_or_id: str) -> CatalogueEntry:
        raise AssertionError("a provisioner has the model")

    def note(self) -> None:
        (provisioning,) = self.provisioner.under_way
        assert self.provisioner.of("m") is provisioning
        self.said.append(provisioning.text)

    async def fetch(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Any, sources: Sources = ()
    ) -> None:
        assert layers == entry.manifest.whole
        self.note()
        progress(1, 2)
        self.note()

    async def hold(
        self,
        entry: CatalogueEntry,
        layers: LayerRange,
        progress: Any = unseen,
        fetching: Any = unseen,
        options: LoadOptions = AS_CONFIGURED,
    ) -> None:
        assert layers == entry.manifest.whole
        self.note()
        fetching(1, 4)
        self.note()
        progress(2, 4)
        self.note()

    async def drop(self, entry: CatalogueEntry, layers: LayerRange) -> None:
        assert layers == entry.manifest.whole
        self.acts.append("drop")

    async def share(self, model_id: str, *, is_permanent: bool) -> None:
        if self.refuses:
            raise Conflict("no room")
        assert not is_permanent
        self.acts.append("share")

    async def view(self, model_id: str) -> Any:
        self.n_ready += 6
        self.note()
        return SimpleNamespace(n_ready=self.n_ready, n_layers=12)

    async def unshare(self, model_id: str) -> None:
        self.acts.append("unshare")


async def test_it_says_what_is_done_and_how_far_it_is() -> None:
    world = World()
    await world.provisioner.load(ENTRY, AS_CONFIGURED)
    assert world.said == ["loading m", "fetching m 25 %", "loading m 50 %"]
    assert world.provisioner.under_way == ()
    assert world.provisioner.of("m") is None
    await world.provisioner.let_go(ENTRY)
    assert world.acts == ["drop"]


async def test_what_is_not_on_the_disk_is_fetched_if_it_has_room() -> None:
    # This model has no tensors; what it lacks is said by the manifest of one that has.
    lacking = replace(ENTRY, manifest=build_manifest(GUIDE_PATH), present=frozenset())
    world = World(free=0)
    await world.provisioner.fetch(lacking)
    assert world.said == []
    world.free = None
    await world.provisioner.fetch(lacking)
    assert world.said == ["fetching m", "fetching m 50 %"]
    await world.provisioner.fetch(ENTRY)
    assert len(world.said) == 2


async def test_what_is_spread_is_withdrawn_when_it_goes(autojump_clock: object) -> None:
    world = World()
    assert await world.provisioner.spread_out(ENTRY)
    assert world.said == ["sharing m", "sharing m 50 %"]
    assert world.provisioner.spread == {ENTRY.model_id}
    await world.provisioner.let_go(ENTRY)
    assert (world.acts, world.provisioner.spread) == (["share", "unshare"], set())


async def test_what_cannot_be_spread_is_not() -> None:
    world = World(refuses=True)
    assert not await world.provisioner.spread_out(ENTRY)
    assert (world.acts, world.provisioner.spread, world.provisioner.under_way) == ([], set(), ())


async def test_what_fails_while_it_spreads_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    async def fail(model_id: str) -> None:
        raise NodeUnreachable("gone")

    monkeypatch.setattr(world, "view", fail)
    with pytest.raises(NodeUnreachable):
        await world.provisioner.spread_out(ENTRY)
    assert (world.acts, world.provisioner.spread) == (["share", "unshare"], set())


@pytest.mark.parametrize(("free", "lacks"), [(None, False), (NEEDED, False), (NEEDED - 1, True)])
def test_its_weights_alone_may_be_more_than_there_is(free: int | None, lacks: bool) -> None:
    assert World(free=free).provisioner.lacks_room(ENTRY) == lacks
