"""What a node does about a plan: one step at a time, only after it has been asked three times, and never so
that the swarm has less than before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from node_ids import A, B, C, D

from swarmllm.config import AutoManageTable
from swarmllm.errors import NodeUnreachable
from swarmllm.models import CatalogueEntry, LayerRange, Manifest, covers, merge, subtract
from swarmllm.models.manifest import EMBEDDING_INDEX, HEAD_INDEX, Shard
from swarmllm.models.model_files import FileState
from swarmllm.node.auto_shard import HELD_MAX, RETRY_S, AutoShardManager, Step, next_step, plan_of, shape_of
from swarmllm.node.shares import ACCEPTED_MAX, GONE_S, SILENT_S
from swarmllm.scheduling.hysteresis import CONSISTENT_TICKS, Hysteresis
from swarmllm.scheduling.placement import ModelShape, Placement, PlacementNode
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLatency, ShardAnnounce, SharedModel

LAYER_BYTES = 2**20
SHAPE = ModelShape(12, 1, 100)
WHOLE = LayerRange(0, 12)
DIGEST = "0" * 64


def make_entry() -> CatalogueEntry:
    shards = tuple(
        Shard(index=i, kind="layer", size_bytes=LAYER_BYTES, blake3=DIGEST, tensors=()) for i in range(12)
    )
    manifest = Manifest(
        name="m",
        architecture="arithmetic",
        n_layers=12,
        n_embd=4,
        n_vocab=10,
        context_length=100,
        cut_alignment=1,
        whole_reason="",
        tied_embedding=False,
        size_bytes=1,
        shards=shards,
    )
    return CatalogueEntry(manifest.model_id, "m", Path("/nowhere"), manifest, FileState(1, 1))


ENTRY = make_entry()


def ranges(*texts: str) -> tuple[LayerRange, ...]:
    return tuple(map(LayerRange.parse, texts))


@pytest.mark.parametrize(
    ("held", "target", "pinned", "elsewhere", "free", "expected"),
    [
        ("", "0:4", "", "", 400, Step(load=LayerRange(0, 4))),
        ("0:4", "0:4", "", "", 0, Step()),
        ("", "0:4", "", "", 399, Step(waits_for="room for 0:4")),
        ("0:8", "0:4", "", "4:12", 0, Step(drop=LayerRange(4, 8))),
        ("0:8", "0:4", "", "4:7", 0, Step(waits_for="another holder of 4:8")),
        ("0:8", "0:4", "4:8", "4:12", 0, Step()),
        ("0:4", "4:8", "", "0:4", 400, Step(load=LayerRange(4, 8))),
        ("0:4", "4:8", "", "0:4", 0, Step(drop=LayerRange(0, 4))),
        ("0:4", "4:8", "", "", 0, Step(waits_for="room for 4:8")),
    ],
    ids=[
        "load",
        "as planned",
        "no room",
        "others have it",
        "the last copy stays",
        "pins stay",
        "load before dropping",
        "drop where there is no room",
        "neither is possible",
    ],
)
def test_one_step(held: str, target: str, pinned: str, elsewhere: str, free: int, expected: Step) -> None:
    parts = [ranges(*text.split()) for text in (held, target, pinned, elsewhere)]
    assert next_step(parts[0], parts[1], parts[2], parts[3], free, SHAPE) == expected


def test_three_of_the_same_in_a_row_are_enough_and_another_one_begins_anew() -> None:
    patience = Hysteresis()
    assert [patience.see(wish) for wish in "aabaaa"] == [False] * 5 + [True]
    patience.forget()
    assert not patience.see("a")


class MemoryPool:
    """Holds whatever it is given."""

    def __init__(self) -> None:
        self.held: tuple[LayerRange, ...] = ()

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.held if model_id == ENTRY.model_id else ()

    def models(self) -> dict[str, tuple[LayerRange, ...]]:
        return {ENTRY.model_id: self.held} if self.held else {}


class Member:
    """A manager with its node's registry; `tell` is its gossip."""

    def __init__(
        self,
        node_id: str,
        n_layers: int,
        max_pipes: int = 0,
        may_work: Callable[[str], bool] = lambda node_id: True,
    ) -> None:
        self.node_id, self.pool = node_id, MemoryPool()
        self.registry = Registry(node_id, may_work)
        self.acts: list[str] = []
        self.failure: NodeUnreachable | None = None
        self.manager = AutoShardManager(
            AutoManageTable(("m",), n_layers * LAYER_BYTES / 2**30, max_pipes),
            node_id=node_id,
            registry=self.registry,
            pool=cast(WorkerPool, self.pool),
            find=self._find,
            load=self._load,
            drop=self._drop,
            on_change=lambda: None,
        )

    async def _find(self, name: str) -> CatalogueEntry:
        return ENTRY

    async def _load(self, entry: CatalogueEntry, layers: LayerRange) -> None:
        self.acts.append(f"load {layers}")
        assert self.manager.loading(ENTRY.model_id) == (layers,)
        if self.failure is not None:
            raise self.failure
        self.pool.held = merge([*self.pool.held, layers])

    async def _drop(self, entry: CatalogueEntry, layers: LayerRange) -> None:
        self.acts.append(f"drop {layers}")
        if self.failure is not None:
            raise self.failure
        self.pool.held = subtract(self.pool.held, [layers])

    def record(self) -> bytes:
        def pairs(held: tuple[LayerRange, ...]) -> tuple[tuple[int, int], ...]:
            return tuple((each.start, each.end) for each in held)

        announced = ShardAnnounce(
            model_id=ENTRY.model_id,
            name="m",
            n_layers=12,
            ranges=pairs(self.pool.held),
            loading=pairs(self.manager.loading(ENTRY.model_id)),
            pinned=pairs(self.manager.pinned(ENTRY.model_id)),
        )
        capability = NodeCapability(
            placed_models=self.manager.model_ids, placing_free_bytes=self.manager.free_bytes
        )
        return encode_record(
            NodeRecord(
                node_id=self.node_id, models=(announced,) if self.pool.held else (), capability=capability
            )
        )


def tell(member: Member, record: NodeRecord) -> None:
    """What another node says of itself."""
    member.registry.apply(record.node_id, encode_record(record))


def holder(node_id: str, *, ready: str = "", loading: str = "") -> NodeRecord:
    """It takes part and has no room left."""
    announced = ShardAnnounce(
        model_id=ENTRY.model_id,
        name="m",
        n_layers=12,
        ranges=tuple((each.start, each.end) for each in ranges(*ready.split())),
        loading=tuple((each.start, each.end) for each in ranges(*loading.split())),
    )
    capability = NodeCapability(placed_models=(ENTRY.model_id,))
    return NodeRecord(node_id=node_id, models=(announced,), capability=capability)


async def live(members: list[Member], n_ticks: int, since_s: float = 0.0, others: Iterable[str] = ()) -> None:
    """Gossip, then one look of everybody, `n_ticks` times; `others` are connected too."""
    for tick in range(n_ticks):
        for member in members:
            member.registry.set_connected(
                {other.node_id for other in members} - {member.node_id} | set(others)
            )
            for other in members:
                member.registry.apply(other.node_id, other.record())
        for member in members:
            await member.manager.tick(since_s + 5.0 * tick)


def layers_of(members: list[Member]) -> list[LayerRange]:
    return [layers for member in members for layers in member.pool.held]


async def test_nobody_moves_before_three_looks_agree() -> None:
    member = Member(A, 12)
    await live([member], CONSISTENT_TICKS)
    assert member.acts == []  # The first look only tells the swarm that it takes part.
    await live([member], 1)
    assert member.acts == ["load 0:12"]
    await live([member], 5)
    assert member.acts == ["load 0:12"]
    assert member.manager.models[0].state == "as planned"


async def test_three_nodes_place_a_model_by_themselves_and_replace_the_one_that_leaves() -> None:
    members = [Member(name, 6) for name in (A, B, C)]
    await live(members, 10)
    held = layers_of(members)
    assert covers(held, WHOLE)
    assert max(len(layers) for layers in held) <= 6
    before = {member.node_id: member.pool.held for member in members}
    (gone,) = [member for member in members if member.pool.held == ranges("0:6")][:1]
    members.remove(gone)
    await live(members, 12, 1000.0)
    assert covers(layers_of(members), WHOLE)
    newcomer = Member(D, 12)
    steady = {member.node_id: member.pool.held for member in members}
    await live([*members, newcomer], 10, 2000.0)
    assert {member.node_id: member.pool.held for member in members} == steady
    assert newcomer.pool.held == (WHOLE,)
    assert before[gone.node_id] == gone.pool.held


async def test_what_a_user_loaded_is_never_dropped_and_counts() -> None:
    loaded, other = Member(A, 12), Member(B, 6)
    loaded.pool.held = ranges("0:6")
    await live([loaded, other], 10)
    assert covers(loaded.pool.held, LayerRange(0, 6))
    assert covers(layers_of([loaded, other]), WHOLE)
    assert not any(act.startswith("drop") for act in loaded.acts)


async def test_what_others_are_still_loading_is_not_dropped_here() -> None:
    """Layers 6:9 are to be b's; until it has them, the copy here is the last."""
    member = Member(A, 6)
    member.pool.held = member.manager.models[0].managed = ranges("6:12")
    tell(member, holder(B, loading="0:9"))
    await live([member], 8, others=(B,))
    assert member.acts == []
    assert member.manager.models[0].state == "waits for another holder of 6:9"
    tell(member, holder(B, ready="0:9"))
    await live([member], CONSISTENT_TICKS, 100.0, others=(B,))
    assert member.acts == ["drop 6:9"]


@pytest.mark.parametrize(
    ("connected", "trusted", "acts"),
    [((B,), (B,), ["load 6:12"]), ((), (B,), []), ((B,), (), [])],
    ids=["counts", "gone", "not trusted"],
)
async def test_only_who_is_connected_and_trusted_is_planned_with(
    connected: tuple[NodeId, ...], trusted: tuple[NodeId, ...], acts: list[str]
) -> None:
    """There is room for half of the model here; the other half is said to be on b."""
    member = Member(A, 6, may_work=lambda node_id: node_id in trusted)
    tell(member, holder(B, ready="0:6"))
    await live([member], CONSISTENT_TICKS + 1, others=connected)
    assert member.acts == acts


async def test_a_step_that_failed_is_tried_again_later_and_says_why() -> None:
    member = Member(A, 12)
    member.failure = NodeUnreachable("nobody gives it")
    await live([member], 4)
    assert member.acts == ["load 0:12"]
    assert member.manager.models[0].state == "nobody gives it"
    assert member.manager.loading(ENTRY.model_id) == ()
    await live([member], 2, 20.0)
    assert member.acts == ["load 0:12"]
    member.failure = None
    await live([member], CONSISTENT_TICKS, 20.0 + RETRY_S)
    assert member.pool.held == (WHOLE,)


async def test_pipelines_are_begun_only_up_to_the_limit_and_standbys_join_them() -> None:
    members = [Member(name, 12, max_pipes=1) for name in (A, B, C, D)]
    await live(members, 12)
    copies = [sum(layer in layers for layers in layers_of(members)) for layer in range(12)]
    assert set(copies) == {2}  # One pipeline, and one standby of every layer.


def test_the_ends_of_a_model_need_room_too() -> None:
    more: dict[str, Any] = {"blake3": DIGEST, "tensors": ()}
    ends = (
        Shard(kind="embedding", index=EMBEDDING_INDEX, size_bytes=7, **more),
        Shard(kind="head", index=HEAD_INDEX, size_bytes=5, **more),
    )
    manifest = msgspec.structs.replace(ENTRY.manifest, shards=(*ends, *ENTRY.manifest.shards))
    assert shape_of(manifest) == ModelShape(12, 1, LAYER_BYTES, 7, 5)
    tied = msgspec.structs.replace(manifest, tied_embedding=True)
    assert shape_of(tied) == ModelShape(12, 1, LAYER_BYTES, 7, 12)


def test_absurd_claims_of_speed_do_not_break_the_plan() -> None:
    def claims(node_id: str, decode_s: float) -> NodeRecord:
        latency = ObservedLatency(model_id=ENTRY.model_id, decode_s=decode_s, prefill_s=decode_s)
        capability = NodeCapability(
            placed_models=(ENTRY.model_id,),
            placing_free_bytes=7 * LAYER_BYTES,
            observed_latencies=(latency,),
        )
        return NodeRecord(node_id=node_id, capability=capability)

    records = {A: claims(A, 5e-324), B: claims(B, 1e9)}
    targets = plan_of(ENTRY.manifest, records, None).targets
    assert sorted(len(layers) for held in targets.values() for layers in held) == [5, 7]


async def test_layers_whose_drop_failed_stay_the_managers() -> None:
    member = Member(A, 6)
    member.pool.held = member.manager.models[0].managed = ranges("6:12")
    tell(member, holder(B, ready="0:9"))
    member.failure = NodeUnreachable("the worker is busy")
    await live([member], CONSISTENT_TICKS + 1, others=(B,))
    assert member.acts == ["drop 6:9"]
    assert member.manager.pinned(ENTRY.model_id) == ()
    assert member.manager.models[0].managed == ranges("6:12")


def test_of_what_others_say_they_hold_a_plan_counts_a_bounded_part() -> None:
    """Each node's share is the same, and who holds little loses nothing."""
    scattered = tuple((start, start + 1) for start in range(0, 12, 2))
    honest = ShardAnnounce(model_id=ENTRY.model_id, name="m", n_layers=12, ranges=((0, 12),))
    records = {"honest": NodeRecord(node_id="honest", models=(honest,))}
    for number in range(HELD_MAX // 4 - 1):
        said = ShardAnnounce(
            model_id=ENTRY.model_id, name="m", n_layers=12, ranges=(*scattered, (2, 5)), pinned=scattered
        )
        records[f"n{number:03}"] = NodeRecord(node_id=f"n{number:03}", models=(said,))
    seen: list[PlacementNode] = []

    def look(shape: ModelShape, nodes: Iterable[PlacementNode], max_pipes: int | None) -> Placement:
        seen.extend(nodes)
        return Placement()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmllm.node.auto_shard.place", look)
        plan_of(ENTRY.manifest, records, None)
    assert sum(len(node.held) for node in seen) <= HELD_MAX
    by_id = {node.node_id: node for node in seen}
    assert by_id["honest"].held == (LayerRange(0, 12),)
    assert all(len(node.held) == len(node.pinned) == 4 for node in seen if node.node_id != "honest")
    assert LayerRange(2, 5) in by_id["n000"].held


class SharingMember(Member):
    """Nothing is configured to be placed on it but what others share."""

    def __init__(self, node_id: str, n_layers: int, *accept: str, share: tuple[str, ...] = ()) -> None:
        super().__init__(node_id, n_layers)
        self.manager = AutoShardManager(
            AutoManageTable((), n_layers * LAYER_BYTES / 2**30, share=share, accept=accept),
            node_id=NodeId(node_id),
            registry=self.registry,
            pool=cast(WorkerPool, self.pool),
            find=self._find,
            load=self._load,
            drop=self._drop,
            on_change=lambda: None,
        )

    async def _find(self, name: str) -> CatalogueEntry:
        if name not in (ENTRY.model_id, "m"):
            raise NodeUnreachable("nobody has it")
        return ENTRY

    def record(self) -> bytes:
        record = decode_record(super().record())
        return encode_record(msgspec.structs.replace(record, shares=self.manager.shares))


SHARE = SharedModel(model_id=ENTRY.model_id, name="m")


async def test_those_that_accept_a_share_hold_it_within_their_budget_until_it_is_withdrawn() -> None:
    members = [SharingMember(A, 5), SharingMember(B, 4, "members"), SharingMember(C, 4, A)]
    refuses = SharingMember(D, 12, B)
    everybody: list[Member] = [*members, refuses]
    members[0].manager.shares = (SHARE,)
    await live(everybody, 12)
    assert merge(layers_of(everybody)) == (WHOLE,)
    assert [sum(map(len, member.pool.held)) <= n for member, n in zip(members, (5, 4, 4), strict=True)] == [
        True
    ] * 3
    assert refuses.acts == []
    members[0].manager.shares = ()
    await live(everybody, 2, 60.0)
    assert layers_of(everybody) == []
    assert all(not member.manager.models for member in everybody)


async def test_what_a_person_loaded_stays_when_a_share_is_withdrawn() -> None:
    members = [SharingMember(A, 12), SharingMember(B, 12, "members")]
    members[1].pool.held = ranges("0:6")
    members[0].manager.shares = (SHARE,)
    await live([*members], 12)
    members[0].manager.shares = ()
    await live([*members], 2, 60.0)
    assert members[1].pool.held == ranges("0:6")
    assert members[0].pool.held == ()


async def test_shares_that_nobody_can_fetch_take_a_bounded_number_of_places_and_no_memory() -> None:
    member = SharingMember(A, 12, "members")
    names = (B, C, D)
    for at, name in enumerate(names):
        shares = tuple(SharedModel(model_id=f"{at}{n}" * 32, name="x") for n in range(8))
        if name == D:
            shares = (SHARE, *shares[1:])
        tell(member, NodeRecord(node_id=name, shares=shares))
    await live([member], 12, others=names)
    assert len(member.manager.models) == ACCEPTED_MAX
    assert member.manager.model_ids == (ENTRY.model_id,)
    assert member.acts == ["load 0:12"]


async def test_a_share_outlasts_its_node_for_a_while() -> None:
    member = SharingMember(A, 12, "members")
    tell(member, NodeRecord(node_id=B, shares=(SHARE,)))
    await live([member], 6, others=[B])
    await live([member], 2, GONE_S - 60)
    assert member.pool.held == (WHOLE,)
    await live([member], 2, GONE_S + 60)
    assert member.pool.held == ()


async def test_what_the_configuration_shares_is_told_once_it_is_known() -> None:
    member = SharingMember(A, 12, share=("absent", "m"))
    await live([member], 1)
    assert member.manager.shares == (SHARE,)
    await live([member], 6)
    assert member.pool.held == (WHOLE,)


async def test_a_sharer_that_has_just_started_has_not_withdrawn_its_share() -> None:
    """Its first record says nothing of shares, because it has not looked yet what is here."""
    member = SharingMember(A, 12, "members")
    tell(member, NodeRecord(node_id=B, shares=(SHARE,)))
    await live([member], 6, others=[B])
    tell(member, NodeRecord(node_id=B, sequence=1))
    await live([member], 2, SILENT_S - 10, others=[B])
    assert member.pool.held == (WHOLE,)
    tell(member, NodeRecord(node_id=B, sequence=2, shares=(SHARE,)))
    await live([member], 2, SILENT_S + 10, others=[B])
    assert member.pool.held == (WHOLE,)
    tell(member, NodeRecord(node_id=B, sequence=3))
    await live([member], 2, 2 * SILENT_S + 20, others=[B])
    assert member.pool.held == ()


async def test_layers_that_a_person_loads_later_stay_when_a_share_is_withdrawn() -> None:
    members = [SharingMember(A, 12), SharingMember(B, 12, "members")]
    members[0].manager.shares = (SHARE,)
    await live([*members], 12)
    (held,) = members[1].pool.held
    by_hand = LayerRange(held.start, held.start + 2)
    members[1].manager.loaded_by_hand(ENTRY.model_id, by_hand)
    members[0].manager.shares = ()
    await live([*members], 2, 60.0)
    assert members[1].pool.held == (by_hand,)
