"""What a node does about models that others share: whose, within what, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing
from msgspec import UNSET
from msgspec.structs import replace as replaced
from node_ids import A, B, C, D
from placing_members import (
    ENTRY,
    LAYER_BYTES,
    SHARE,
    WHOLE,
    Member,
    SharingMember,
    holder,
    layers_of,
    live,
    ranges,
    tell,
)

from swarmllm.errors import Conflict, InvalidRequest
from swarmllm.models import CatalogueEntry, LayerRange, merge
from swarmllm.node.model_access import Progress, Sources
from swarmllm.node.placing.accepted_shares import ACCEPTED_MAX, GONE_S, SILENT_S
from swarmllm.node.placing.auto_shard import FAMILIAR_LOOKS
from swarmllm.node.sharing.sharing import Sharing
from swarmllm.scheduling.placement import CONSISTENT_TICKS
from swarmllm_proto.codec import decode_record
from swarmllm_proto.identifiers import Digest, ModelId, NodeId, PublishedName
from swarmllm_proto.swarm import NodeCapability, NodeRecord, SharedFile, SharedModel


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


async def test_a_share_that_cannot_be_fetched_gives_its_place_to_another() -> None:
    """All places are taken by models that nobody has; the one that can be had comes after them."""
    member = SharingMember(A, 12, "members")
    for at, name in enumerate((B, C)):
        unknown = tuple(SharedModel(model_id=f"{at}{n}" * 32, name="x") for n in range(8))
        tell(member, NodeRecord(node_id=name, shares=unknown))
    await live([member], 1, others=(B, C))
    assert len(member.manager.models) == ACCEPTED_MAX
    tell(member, NodeRecord(node_id=D, shares=(SHARE,)))
    await live([member], 4, 5.0, others=(B, C, D))
    assert member.acts == []
    await live([member], 30, 30.0, others=(B, C, D))
    assert member.acts == ["load 0:12"]


class FetchingMember(SharingMember):
    """Its fetches end when they are let."""

    def __init__(self, node_id: str, n_layers: int, *accept: str) -> None:
        super().__init__(node_id, n_layers, *accept)
        self.fetching, self.let = trio.Event(), trio.Event()
        self.sources: Sources = ()

    async def fetch(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Progress, sources: Sources = ()
    ) -> None:
        self.acts.append(f"fetch {layers}")
        self.sources = sources
        self.fetching.set()
        progress(1, 2)
        try:
            await self.let.wait()
        except trio.Cancelled:
            self.acts.append("cancelled")
            raise


async def test_what_others_have_fetched_so_far_is_what_they_say_and_never_more_than_all() -> None:
    member = SharingMember(A, 12)
    for node_id, fetched in ((B, (3, 9)), (C, (10, 9)), (D, UNSET)):
        said = holder(node_id, loading="4:8")
        models = tuple(replaced(each, fetched=fetched) for each in said.models)
        tell(member, replaced(said, models=models))
    member.registry.set_reachable({B, C, D})
    sharing = Sharing(member.manager, member.registry, NodeId(A), models=member)
    members = (await sharing.view("m")).members
    shown = [(each.node_id, each.arrived_bytes, each.total_bytes) for each in members]
    assert shown == [(B, 3, 9), (C, 9, 9), (D, 0, 0)]


async def test_a_model_that_takes_long_to_arrive_keeps_no_look_waiting_and_ends_with_its_share(
    patient_clock: trio.testing.MockClock,
) -> None:
    member = FetchingMember(A, 12, "members")
    tell(member, NodeRecord(node_id=B, shares=(SHARE,)))
    member.registry.set_reachable({B})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.manager.run)
        with trio.fail_after(600):
            while not member.fetching.is_set():
                member.registry.apply(A, member.record())
                await trio.sleep(1)
            (model,) = member.manager.models
            assert (model.state, model.arrived) == ("fetching 0:12", (1, 2))
            assert member.manager.fetched(ENTRY.model_id) == (1, 2)
            other = SharedModel(model_id="1" * 64, name="other")
            tell(member, NodeRecord(node_id=B, sequence=1, shares=(SHARE, other)))
            while len(member.manager.models) < 2 or not member.manager.models[1].n_failures:  # noqa: ASYNC110
                await trio.sleep(1)
            tell(member, NodeRecord(node_id=B, sequence=2, shares=()))
            while member.manager.models:  # noqa: ASYNC110
                await trio.sleep(1)
        assert member.acts == ["fetch 0:12", "cancelled"]
        assert member.manager.fetched(ENTRY.model_id) is UNSET
        nursery.cancel_scope.cancel()


async def test_a_file_is_looked_for_where_those_say_whose_share_is_followed(
    patient_clock: trio.testing.MockClock,
) -> None:
    member = FetchingMember(A, 12, B)
    source = PublishedName("hf:ORG/REPO:FILE.gguf")
    for node_id, share in ((B, replaced(SHARE, source=source)), (C, replaced(SHARE, source="hf:a/b:c.gguf"))):
        tell(member, NodeRecord(node_id=node_id, shares=(share,)))
    member.registry.set_reachable({B, C})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.manager.run)
        with trio.fail_after(600):
            while not member.fetching.is_set():
                member.registry.apply(A, member.record())
                await trio.sleep(1)
        assert member.sources == ((B, source),)
        nursery.cancel_scope.cancel()


async def test_others_are_told_where_a_file_is_published_until_its_share_ends() -> None:
    member = SharingMember(A, 12)
    source = PublishedName("hf:ORG/REPO:FILE.gguf")
    await member.manager.share(ENTRY, source)
    await member.manager.share(ENTRY)
    (share,) = decode_record(member.record()).shares or ()
    assert share == replaced(SHARE, source=source)
    await member.manager.unshare(ENTRY.model_id)
    await member.manager.share(ENTRY)
    assert decode_record(member.record()).shares == (SHARE,)


async def test_a_share_by_command_is_told_and_written_down_and_ends_by_command() -> None:
    member = SharingMember(A, 12)
    await member.manager.share(ENTRY)
    assert member.manager.shares == (SHARE,)
    await live([member], 6)
    assert member.pool.held == (WHOLE,)
    with pytest.raises(Conflict, match="does not share"):
        await member.manager.unshare(ModelId("1" * 64))
    await member.manager.unshare(ENTRY.model_id)
    assert member.manager.shares == ()
    await live([member], 2, 60.0)
    assert member.pool.held == ()
    configured = SharingMember(A, 12, share=("m",))
    await live([configured], 1)
    with pytest.raises(Conflict, match=r"auto_manage\.share"):
        await configured.manager.unshare(ENTRY.model_id)


async def test_a_share_ends_by_any_name_of_its_model_and_on_the_node_that_shares_it() -> None:
    member = SharingMember(A, 12, "members")
    member.further_names = ("further",)
    sharing = Sharing(member.manager, member.registry, NodeId(A), models=member)
    tell(member, NodeRecord(node_id=B, nickname="attic", shares=(SHARE,)))
    member.registry.set_reachable({B})
    with pytest.raises(InvalidRequest, match="m is shared by attic: run `swarmllm unshare` there"):
        await sharing.unshare("m")
    with pytest.raises(InvalidRequest, match="further is shared by attic"):
        await sharing.unshare("further")
    await member.manager.share(ENTRY)
    assert (await sharing.unshare("further")).model == "m"
    assert member.manager.shares == ()
    tell(member, NodeRecord(node_id=B, sequence=1, nickname="attic", shares=()))
    other = SharedModel(model_id="1" * 64, name="other")
    member.manager.shares = (other,)
    with pytest.raises(InvalidRequest, match=r"does not share a model 'm' \(it shares: other\)"):
        await sharing.unshare("m")
    digest = Digest("0" * 64)
    file = SharedFile(
        source=PublishedName("hf:o/r:f.gguf"), name="big", header=digest, size_bytes=1, parts=()
    )
    tell(member, NodeRecord(node_id=B, sequence=2, nickname="attic", shared_files=(file,)))
    with pytest.raises(InvalidRequest, match="big is shared by attic"):
        await sharing.unshare("big")


async def test_a_model_whose_cuts_are_being_tried_is_not_shared_yet() -> None:
    member = SharingMember(A, 12)
    sharing = Sharing(member.manager, member.registry, NodeId(A), models=member)
    member.untold = {ENTRY.model_id}
    with pytest.raises(Conflict, match="is being tried where it can be cut"):
        await sharing.share("m")
    assert member.manager.shares == UNSET


async def test_no_more_models_are_shared_than_a_record_has_room_for() -> None:
    member = SharingMember(A, 12)
    for n in range(8):
        await member.manager.share(replace(ENTRY, model_id=ModelId(f"{n}" * 64)))
    with pytest.raises(Conflict, match="8 models already"):
        await member.manager.share(ENTRY)
    assert len(decode_record(member.record()).shares or ()) == 8


async def test_a_loaded_model_whose_file_is_gone_does_not_end_the_looks() -> None:
    member = SharingMember(A, 12, "members")
    gone = ModelId("9" * 64)
    member.pool.models = lambda: {gone: ranges("0:1")}  # type: ignore[method-assign]
    tell(member, NodeRecord(node_id=B, shares=(SHARE,)))
    await live([member], 1, others=[B])
    assert [model.name for model in member.manager.models] == [ENTRY.model_id]


async def test_a_new_share_is_placed_at_once_when_all_that_accept_it_have_said_so() -> None:
    members = [SharingMember(A, 6), SharingMember(B, 6, "members"), SharingMember(C, 6, "members")]
    members[0].manager.shares = (SHARE,)
    # One look to follow the share, one to say so, one to load.
    await live([*members], 3)
    assert merge(layers_of([*members])) == (WHOLE,)


async def test_one_that_begins_later_than_others_takes_what_the_plan_gave_it_and_not_less() -> None:
    """C has room for another layer, and would be given one beside those that it is loading."""
    member = SharingMember(B, 5, "members")
    member.registry.set_reachable({A, C})
    for node_id, loading, n_free in ((A, "", 5), (C, "8:12", 1)):
        said = holder(node_id, loading=loading)
        capability = replaced(
            said.capability, accepts_shares_of=("members",), placing_free_bytes=n_free * LAYER_BYTES
        )
        tell(member, replaced(said, capability=capability, shares=(SHARE,) if node_id == A else UNSET))
    for _ in range(3):
        member.registry.apply(B, member.record())
        await member.manager.tick(0.0)
    assert member.pool.held == ranges("4:8")


async def test_it_follows_the_first_plan_though_another_one_is_ready_before_it_begins() -> None:
    member = SharingMember(B, 5, "members")
    member.registry.set_reachable({A, C})

    def told(sequence: int, node_id: str, ready: str, n_free: int) -> None:
        said = holder(node_id, ready=ready)
        capability = replaced(
            said.capability, accepts_shares_of=("members",), placing_free_bytes=n_free * LAYER_BYTES
        )
        if node_id == C and not ready:
            capability = replaced(capability, placed_models=())
        shares = (SHARE,) if node_id == A else UNSET
        tell(member, replaced(said, sequence=sequence, capability=capability, shares=shares))

    async def look() -> None:
        member.registry.apply(B, member.record())
        await member.manager.tick(0.0)

    for _ in range(FAMILIAR_LOOKS):
        await look()
    told(0, A, "", 5)
    told(0, C, "", 5)
    for _ in range(2):
        await look()
    assert member.pool.held == (), "C has not said yet that it takes part"
    told(1, C, "8:12", 1)
    await look()
    assert member.pool.held == ranges("4:8")


async def test_what_others_hold_against_the_first_plan_is_left_to_the_usual_one() -> None:
    member = SharingMember(B, 5, "members")
    member.registry.set_reachable({A, C})
    for _ in range(FAMILIAR_LOOKS):
        await member.manager.tick(0.0)
    for sequence, ready in ((0, ""), (1, "2:4 9:11")):
        for node_id in (A, C):
            said = holder(node_id, ready=ready if node_id == C else "")
            capability = replaced(
                said.capability,
                accepts_shares_of=("members",),
                placing_free_bytes=(1 if ready and node_id == C else 5) * LAYER_BYTES,
            )
            shares = (SHARE,) if node_id == A else UNSET
            tell(member, replaced(said, sequence=sequence, capability=capability, shares=shares))
        member.registry.apply(B, member.record())
        await member.manager.tick(0.0)
    assert member.pool.held == (), "a change of plan is seen three times before it is followed"


async def test_layers_that_the_first_plan_gives_to_a_node_that_left_it_are_taken_in_the_end() -> None:
    """C follows the usual plan, by which B takes 8:9; by the first one, which B follows, C does."""
    member = SharingMember(B, 5, "members")
    member.registry.set_reachable({A, C})
    sequence = 0

    def told(node_id: str, n_free: int, *, ready: str = "", loading: str = "") -> None:
        nonlocal sequence
        sequence += 1
        said = holder(node_id, ready=ready, loading=loading)
        capability = replaced(
            said.capability, accepts_shares_of=("members",), placing_free_bytes=n_free * LAYER_BYTES
        )
        shares = (SHARE,) if node_id == A else UNSET
        tell(member, replaced(said, sequence=sequence, capability=capability, shares=shares))

    async def look() -> None:
        member.registry.apply(B, member.record())
        await member.manager.tick(0.0)

    for _ in range(FAMILIAR_LOOKS):
        await look()
    told(A, 5)
    told(C, 5)
    for _ in range(2):
        await look()
    assert member.pool.held == ranges("4:8"), "by the first plan"
    told(A, 1, ready="0:4")
    told(C, 3, loading="10:12")
    for _ in range(4 * CONSISTENT_TICKS):
        await look()
    assert member.pool.held == ranges("4:8"), "C is at work still"
    told(C, 3, ready="10:12")
    for _ in range(3 * CONSISTENT_TICKS):
        await look()
    assert member.pool.held == ranges("4:9")


async def test_a_node_offers_no_memory_that_the_machine_does_not_have() -> None:
    member = SharingMember(A, 12)
    member.manager.shares = (SHARE,)
    assert member.manager.free_bytes == 12 * LAYER_BYTES
    member.pool.free = 2**28 + 5
    assert member.manager.free_bytes == 12 * LAYER_BYTES, "its budget is less"
    member.pool.free = 11 * LAYER_BYTES
    assert member.manager.free_bytes == 0, "in steps of 256 MiB"


async def test_what_a_request_loaded_takes_none_of_the_budget_and_what_a_person_loaded_does() -> None:
    member = SharingMember(A, 12)
    member.manager.shares = (SHARE,)
    member.pool.held = ranges("0:6")
    await member.manager.learn_shapes()
    assert member.manager.free_bytes == 6 * LAYER_BYTES
    member.manager.is_on_demand = lambda model_id: model_id == ENTRY.model_id
    assert member.manager.free_bytes == 12 * LAYER_BYTES
    await live([member], 1)
    assert member.manager.model_ids == (ENTRY.model_id,)
    assert member.manager.free_bytes == 6 * LAYER_BYTES, "it is shared now"


async def test_it_waits_for_one_that_accepts_and_has_not_said_so_yet() -> None:
    member = SharingMember(A, 12)
    member.manager.shares = (SHARE,)
    silent = NodeCapability(accepts_shares_of=("members",), placing_free_bytes=12 * LAYER_BYTES)
    tell(member, NodeRecord(node_id=B, capability=silent))
    await live([member], 3, others=[B])
    assert member.pool.held == ()
    assert member.manager.models[0].begins
    # It may be of an older version, or have no place for it: that is waited for as long as always.
    await live([member], 2, 20.0, others=[B])
    assert member.pool.held == (WHOLE,)
