"""What strangers announce, as it is shown: bounded, in slices, and made again only where it has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio
import trio.testing
from api_fakes import Stand, open_node, serve_node
from node_ids import node_id_named

from swarmllm.api.admin.node_json import HOLDERS_SHOWN, PEER_MODELS_SHOWN, RANGES_SHOWN
from swarmllm.api.http.json import SLICE_BYTES, encoded
from swarmllm.models import LayerRange
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.records.registry import LISTED_MAX
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import FileAnnounce, NodeRecord, ShardAnnounce

N_LIARS = 4
COMMON = "c" * 64
DEADLINE_S = 60


def record(name: str, first: int, n_models: int, **more: Any) -> bytes:
    models = [
        ShardAnnounce(
            model_id=f"{first + each:064x}",
            name=f"m{first + each}",
            n_layers=1000,
            ranges=tuple((2 * n, 2 * n + 1) for n in range(8)),
        )
        for each in range(n_models)
    ]
    common = ShardAnnounce(model_id=COMMON, name="common", n_layers=8, ranges=((0, 8),))
    return encode_record(NodeRecord(node_id=node_id_named(name), models=(common, *models), **more))


async def flood(stand: Stand) -> dict[str, InMemoryRouter]:
    """`N_LIARS` nodes announce 256 models each, and an honest one a single one beside the common one."""
    routers = {}
    for number in range(N_LIARS):
        name = f"liar{number}"
        routers[name] = router = stand.network.add(node_id_named(name))
        files = tuple(FileAnnounce(model_id=f"{number}{n:063x}", name="f", n_layers=9) for n in range(100))
        await router.publish(record(name, 10_000 * (number + 1), 255, files=files))
    routers["zoe"] = stand.network.add(node_id_named("zoe"))
    await routers["zoe"].publish(record("zoe", 1, 1))
    with trio.fail_after(DEADLINE_S):
        while stand.registry.n_models() < 2 + N_LIARS * 255:
            await trio.lowlevel.checkpoint()
    return routers


async def test_lists_are_bounded_and_say_what_they_leave_out(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await flood(stand)
        answer = (await stand.http.get("/api/admin/models")).json()
        peers = (await stand.http.get("/api/admin/peers")).json()["peers"]
        liar = (await stand.http.get(f"/api/admin/peers/{node_id_named('liar0')}")).json()["connected"]
        mine = (await stand.http.get("/v1/models")).json()["data"]
        hidden = (await stand.http.get("/api/admin/models/m10254/status")).json()
    shown = {model["name"] for model in answer["models"]}
    # The guide, which this node announces as one that it has files of, is among those listed.
    assert len(answer["models"]) == LISTED_MAX
    assert {"guide", "common", "m1"} <= shown
    assert answer["left_out"] == 1 + 2 + N_LIARS * 255 - LISTED_MAX
    for model in answer["models"]:
        assert len(model["missing"]) <= RANGES_SHOWN
        assert model["n_missing"] >= len(model["missing"])
    for peer in peers:
        assert max(len(peer["models"]), len(peer["files"])) <= PEER_MODELS_SHOWN
        assert all(len(model["layers"]) <= RANGES_SHOWN for model in peer["models"])
    assert {(peer["n_models"], peer["n_files"]) for peer in peers} == {(256, 100), (2, 0)}
    assert (len(liar["models"]), len(liar["files"])) == (256, 100)
    assert [model["id"] for model in mine] == ["guide"]
    assert hidden["name"] == "m10254"
    assert "m10254" not in shown


async def test_holders_are_listed_up_to_a_number_this_node_first(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        ((guide, _),) = stand.pool.models().items()
        held = ShardAnnounce(model_id=guide, name="guide", n_layers=12, ranges=((0, 12),))
        given = FileAnnounce(model_id=guide, name="guide", n_layers=12)
        n_peers = HOLDERS_SHOWN + 5
        for number in range(n_peers):
            name = f"a{number:03}"
            said = NodeRecord(node_id=node_id_named(name), models=(held,), files=(given,))
            await stand.network.add(node_id_named(name)).publish(encode_record(said))
        with trio.fail_after(DEADLINE_S):
            while len(stand.registry.held(guide)) <= n_peers:
                await trio.lowlevel.checkpoint()
        shown = (await stand.http.get("/api/admin/models/guide/status")).json()
    assert (len(shown["holders"]), shown["n_holders"]) == (HOLDERS_SHOWN, n_peers + 1)
    assert shown["holders"][0]["is_self"]
    assert (len(shown["sources"]), shown["n_sources"]) == (HOLDERS_SHOWN, n_peers)


async def test_only_models_that_changed_are_worked_out_again(tmp_path: Path) -> None:
    async with open_node(tmp_path) as stand:
        routers = await flood(stand)
        keeper = stand.node.models
        await keeper.list()
        n_made = keeper._coverages.n_made
        assert n_made == LISTED_MAX
        # Load is news of the node, not of its models.
        await routers["zoe"].publish(record("zoe", 1, 1, sequence=2))
        await trio.testing.wait_all_tasks_blocked()
        await keeper.list()
        assert keeper._coverages.n_made == n_made
        await routers["zoe"].publish(record("zoe", 2, 1, sequence=3))
        with trio.fail_after(DEADLINE_S):
            while stand.registry.model(f"{2:064x}") is None:
                await trio.lowlevel.checkpoint()
        await keeper.list()
        # One model came, and one took the place of the one that went.
        assert n_made < keeper._coverages.n_made <= n_made + 2
        assert len(keeper._coverages._known) == LISTED_MAX


async def test_only_nodes_whose_ranges_changed_are_merged_again(tmp_path: Path) -> None:
    async with open_node(tmp_path) as stand:
        guide = (await stand.node.models.get("guide")).model_id

        def holds(*ranges: tuple[int, int], sequence: int) -> bytes:
            held = ShardAnnounce(model_id=guide, name="guide", n_layers=12, ranges=ranges)
            return encode_record(NodeRecord(node_id=node_id_named("x"), sequence=sequence, models=(held,)))

        other = ShardAnnounce(model_id=guide, name="guide", n_layers=12, ranges=((0, 2), (1, 4)))
        router = stand.network.add(node_id_named("x"))
        await router.publish(holds((6, 8), (7, 12), sequence=1))
        await stand.network.add(node_id_named("y")).publish(
            encode_record(NodeRecord(node_id=node_id_named("y"), models=(other,)))
        )
        with trio.fail_after(DEADLINE_S):
            while stand.registry.held(guide).keys() < {node_id_named("x"), node_id_named("y")}:
                await trio.lowlevel.checkpoint()
        before = {view.node_id: view for view in (await stand.node.models.get("guide")).holders}
        await router.publish(holds((2, 3), sequence=2))
        with trio.fail_after(DEADLINE_S):
            while stand.registry.held(guide)[node_id_named("x")] != (LayerRange(2, 3),):
                await trio.lowlevel.checkpoint()
        after = {view.node_id: view for view in (await stand.node.models.get("guide")).holders}
    assert before[node_id_named("x")].layers == (LayerRange(6, 12),)
    assert after[node_id_named("x")].layers == (LayerRange(2, 3),)
    assert after[node_id_named("y")].layers == (LayerRange(0, 4),)
    assert after[node_id_named("y")].layers is before[node_id_named("y")].layers


async def test_others_have_their_turn_while_a_long_list_is_encoded() -> None:
    since_turn, most = 0, 0

    def as_json(item: int) -> object:
        nonlocal since_turn, most
        since_turn += 1000
        most = max(most, since_turn)
        return {"filler": "x" * 987}

    async def take_turns() -> None:
        nonlocal since_turn
        while True:
            since_turn = 0
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await trio.lowlevel.checkpoint()
        pieces = await encoded(range(500), as_json)
        nursery.cancel_scope.cancel()
    assert {len(bytes(piece)) for piece in pieces} == {1000}
    # Trio shuffles who goes first in a turn: two slices may follow one another.
    assert most <= 2 * (SLICE_BYTES + 1000)
