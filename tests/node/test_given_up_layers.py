"""What a node announces of layers that it is about to give up."""

from __future__ import annotations

from typing import Any, cast

from msgspec import UNSET
from node_ids import A
from placing_members import ENTRY

from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.node.announcing.announcer import Announcer
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.swarm import FileAnnounce, KeptPrefix, NodeCapability

N_LAYERS = ENTRY.manifest.n_layers
KEPT = KeptPrefix(hash=b"k" * 32, n_blocks=3)


class HoldsAll:
    """All that an announcer asks about holdings: one model is loaded, and KV of it is kept."""

    model_ids = ()
    shares = shared = fetched_files = UNSET
    gives = False

    def list(self) -> tuple[CatalogueEntry, ...]:
        return (ENTRY,)

    def models(self) -> dict[ModelId, tuple[LayerRange, ...]]:
        return {ENTRY.model_id: (LayerRange(0, N_LAYERS),)}

    def kept_prefixes(self) -> dict[ModelId, tuple[KeptPrefix, ...]]:
        return {ENTRY.model_id: (KEPT,)}

    def loading(self, _model_id: ModelId) -> tuple[LayerRange, ...]:
        return ()

    pinned = loading

    def fetched(self, _model_id: ModelId) -> Any:
        return UNSET

    def loaded_with(self, _model_id: ModelId) -> None:
        return None

    def kernel_class(self, _model_id: ModelId) -> str:
        return ""

    def may_be_told(self, _model_id: ModelId) -> bool:
        return True

    def announcements(self, _entries: object) -> tuple[FileAnnounce, ...]:
        return ()

    def announce_far(self, _names: object) -> None: ...


class Files:
    shared = fetched = UNSET


async def test_layers_are_not_announced_from_the_moment_at_which_they_are_given_up() -> None:
    every = cast(Any, HoldsAll())
    async with InMemoryNetwork() as network:
        router, registry = network.add(A), Registry(A)
        announcer = Announcer(
            "a",
            router=router,
            registry=registry,
            pool=every,
            catalogue=every,
            transfer=every,
            observations=Observations(),
            describe=NodeCapability,
            placing=every,
            files=cast(Any, Files()),
            models=every,
        )

        async def ranges() -> tuple[tuple[int, int], ...]:
            await announcer.publish()
            record = registry.apply(A, router.records()[A])
            return record.models[0].ranges if record.models else ()

        assert await ranges() == ((0, N_LAYERS),)
        with announcer.giving_up(ENTRY.model_id, LayerRange(0, 4)):
            assert await ranges() == ((4, N_LAYERS),)
            with announcer.giving_up(ENTRY.model_id, LayerRange(2, N_LAYERS)):
                assert await ranges() == ()
            assert await ranges() == ((4, N_LAYERS),)
        assert await ranges() == ((0, N_LAYERS),)
        # A node that stops gives the KV that it keeps until it is gone.
        await announcer.leave()
        assert await ranges() == ()
        (told,) = registry.apply(A, router.records()[A]).prefix_caches
        assert told.prefixes == (KEPT,)
