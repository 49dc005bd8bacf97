"""Nodes that place a model give its projector to as many of them as there are to be."""

from __future__ import annotations

from typing import cast

import msgspec
import trio
from msgspec import UNSET
from node_ids import A, B, C
from placing_members import ENTRY, LAYER_BYTES, WHOLE, Member, live

from swarmllm.config import AutoManageTable
from swarmllm.errors import NodeUnreachable
from swarmllm.models import CatalogueEntry
from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.node.placing.projectors import RETRY_S, ProjectorPlacing
from swarmllm.scheduling.placement import CONSISTENT_TICKS
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.identifiers import Digest, NodeId
from swarmllm_proto.swarm import ProjectorAnnounce

SIZE = 2 * LAYER_BYTES
DIGEST = Digest("5e" * 32)


class SeeingMember(Member):
    """Has a projector, or may take one."""

    def __init__(self, node_id: NodeId, n_layers: int, *, has_it: bool = False, n_wanted: int = 2) -> None:
        super().__init__(node_id, n_layers)
        self.has_it = has_it
        self.projectors = ProjectorPlacing(node_id, self, n_wanted=n_wanted)
        self.manager = AutoShardManager(
            AutoManageTable(("m",), n_layers * LAYER_BYTES / 2**30),
            node_id=node_id,
            registry=self.registry,
            pool=cast(WorkerPool, self.pool),
            models=self,
            on_change=lambda: None,
            projectors=self.projectors,
        )

    async def hold_projector(self, entry: CatalogueEntry) -> None:
        self.acts.append("take")
        if self.failure is not None:
            raise self.failure
        self.has_it = True

    async def let_go_projector(self, entry: CatalogueEntry) -> None:
        self.acts.append("let go")
        self.has_it = False

    def record(self) -> bytes:
        said = ProjectorAnnounce(
            model_id=ENTRY.model_id, projector=DIGEST, n_embd=ENTRY.manifest.n_embd, size_bytes=SIZE
        )
        record = decode_record(super().record())
        return encode_record(msgspec.structs.replace(record, projectors=(said,) if self.has_it else UNSET))


def takes(members: list[SeeingMember]) -> list[tuple[NodeId, str]]:
    return [(NodeId(m.node_id), act) for m in members for act in m.acts if act in ("take", "let go")]


async def settle(members: list[SeeingMember], n_ticks: int = 12, since_s: float = 0.0) -> None:
    await live(list[Member](members), n_ticks, since_s)


async def test_a_second_node_takes_it_once_and_a_third_when_one_has_left() -> None:
    members = [
        SeeingMember(A, 14, has_it=True),
        SeeingMember(B, 15),
        SeeingMember(C, 13),
    ]
    await settle(members, 2 * CONSISTENT_TICKS + 6)
    assert takes(members) == [(B, "take")], "C has less room"
    assert members[1].manager.own_room[0] == members[1].manager._budget_bytes - SIZE - sum(
        len(layers) * LAYER_BYTES for layers in members[1].pool.held
    )
    members[2].manager._budget_bytes += SIZE
    await settle([members[1], members[2]], since_s=1000.0)
    assert takes(members) == [(B, "take"), (C, "take")]
    # A comes back with its own: of the two that took it, one lets it go.
    await settle(members, since_s=2000.0)
    last = max(B, C)
    expected = sorted([(B, "take"), (C, "take"), *([(last, "let go")] if last > A else [])])
    assert sorted(takes(members)) == expected
    assert members[0].has_it


async def test_nothing_is_placed_where_nobody_has_one_or_none_is_wanted() -> None:
    for n_wanted, has_it in ((2, False), (0, True), (1, True)):
        members = [
            SeeingMember(A, 14, has_it=has_it, n_wanted=n_wanted),
            SeeingMember(B, 15, n_wanted=n_wanted),
        ]
        await settle(members)
        assert takes(members) == []


async def test_a_failure_is_tried_again_later_and_what_its_user_took_stays(autojump_clock: object) -> None:
    taker = SeeingMember(B, 15)
    taker.failure = NodeUnreachable("nobody gives it")
    taker.pool.held = (WHOLE,)
    members = [SeeingMember(A, 14, has_it=True), taker]
    await settle(members)
    assert takes(members) == [(B, "take")]
    taker.failure = None
    await settle(members)
    assert takes(members) == [(B, "take")], "not yet"
    await trio.sleep(RETRY_S)
    await settle(members)
    assert takes(members) == [(B, "take")] * 2
    taker.projectors.belongs_to_user(ENTRY.model_id)
    await settle([*members, SeeingMember(C, 13, has_it=True)])
    assert takes(members) == [(B, "take")] * 2
