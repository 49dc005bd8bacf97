"""Which stages of a broken pipeline keep what they have, and from where the others get their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_ids import A, C, D, E, node_id_named

from bench.common.arithmetic import FakePool
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.output import InvalidReport
from swarmllm.pipeline.repair.plan import Rebuild, StageRemainder, is_anew, rebuilds, repair_route
from swarmllm.pipeline.repair.rebuild import RebuildSchedule
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.scheduling.cheapest import route_cost_s
from swarmllm.scheduling.constraints import Constraints, Pin
from swarmllm.scheduling.cost import NodeSpeed
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId

from .fakes import open_swarm
from .test_assembly import ask, held, stages

N_DUE = 10
WHOLE, LOST, NO_JOURNAL, BEHIND = (
    StageRemainder(10, 10),
    StageRemainder(),
    StageRemainder(10, 4),
    StageRemainder(9, 10),
)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ([WHOLE, WHOLE, WHOLE], []),
        ([WHOLE, LOST, WHOLE], [Rebuild(0, 1)]),
        ([WHOLE, WHOLE, LOST], [Rebuild(1, 2)]),
        ([LOST, WHOLE, WHOLE], [Rebuild(None, 0)]),
        # Together: the second is built from what the first gives.
        ([WHOLE, LOST, LOST, WHOLE], [Rebuild(0, 2)]),
        ([LOST, WHOLE, LOST], [Rebuild(None, 0), Rebuild(1, 2)]),
        # Nobody has what went into it: the stage before computes again, and so on.
        ([WHOLE, NO_JOURNAL, LOST, WHOLE], [Rebuild(0, 2)]),
        ([NO_JOURNAL, NO_JOURNAL, LOST, WHOLE], [Rebuild(None, 2)]),
        # A journal without KV is of no use: the stage has to compute anyway.
        ([WHOLE, BEHIND, LOST], [Rebuild(0, 2)]),
        ([NO_JOURNAL, WHOLE, NO_JOURNAL], []),
        ([LOST, LOST, LOST], [Rebuild(None, 2)]),
        ([NO_JOURNAL, LOST], [Rebuild(None, 1)]),
    ],
)
def test_lost_stages_get_their_rows_from_the_nearest_journal(
    left: list[StageRemainder], expected: list[Rebuild]
) -> None:
    assert list(rebuilds(left, N_DUE)) == expected


def test_stages_that_are_built_together_begin_behind_what_each_of_them_has() -> None:
    left = [WHOLE, LOST, LOST, WHOLE]
    assert rebuilds(left, N_DUE, {1: 6, 2: 4}) == (Rebuild(0, 2, 4),)
    assert rebuilds(left, N_DUE, {1: 6}) == (Rebuild(0, 2),)
    assert rebuilds([WHOLE, NO_JOURNAL, LOST], N_DUE, {2: 4}) == (Rebuild(0, 2),)
    assert rebuilds([WHOLE, LOST], N_DUE, {1: 99}) == (Rebuild(0, 1, N_DUE - 1),)
    feeding = RebuildSchedule(rebuilds([WHOLE, LOST], N_DUE, {1: 4}), N_DUE, 3)
    assert [(each.position, each.n_tokens) for each in feeding.next_replays("r")] == [(4, 3), (7, 3)]


def test_nothing_is_left_where_the_tokens_have_to_go_through_every_stage() -> None:
    assert is_anew(rebuilds([LOST, LOST], N_DUE), 2)
    assert is_anew(rebuilds([NO_JOURNAL, LOST], N_DUE), 2)
    assert not is_anew(rebuilds([LOST, WHOLE], N_DUE), 2)
    assert not is_anew(rebuilds([WHOLE, LOST], N_DUE), 2)
    assert not is_anew((), 1)


LEFT = st.builds(StageRemainder, st.integers(0, 12), st.integers(0, 12))


@given(st.lists(LEFT, min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 5))
def test_whatever_is_left_every_stage_ends_with_its_rows_once_and_keeps_what_is_whole(
    left: list[StageRemainder], n_due: int, chunk_tokens: int
) -> None:
    """Played through: what a stage sends must have been computed there, in order, from the first row on."""
    computed = [list(range(each.n_rows)) for each in left]
    n_computed = [0] * len(left)
    feeding = RebuildSchedule(rebuilds(left, n_due), n_due, chunk_tokens)
    while not feeding.is_over:
        rebuild = feeding.now
        assert rebuild is not None
        chunks = [(chunk.position, chunk.n_tokens) for chunk in iter(feeding.next_embedded, None)]
        for message in feeding.next_replays("r"):
            assert (message.stage, message.until) == (rebuild.source, rebuild.until)
            # It has this in its journal, and is not computing it again itself.
            assert message.position + message.n_tokens <= left[message.stage].n_journal
            assert n_computed[message.stage] == 0
            chunks.append((message.position, message.n_tokens))
        assert chunks
        assert sum(n for _, n in chunks) <= (rebuild.until - rebuild.first + 2) * chunk_tokens
        for position, n_tokens in chunks:
            for stage in range(rebuild.first, rebuild.until + 1):
                del computed[stage][position:]
                assert len(computed[stage]) == position
                computed[stage] += range(position, position + n_tokens)
                n_computed[stage] += n_tokens
            feeding.passed(position + n_tokens)
    assert all(rows[:n_due] == list(range(n_due)) for rows in computed)
    assert set(n_computed) <= {0, n_due}
    # Who has a journal and every row computes nothing, unless it is upstream of a gap that reaches further.
    assert sum(n_computed) <= n_due * (
        1 + max((i for i, each in enumerate(left) if min(each) < n_due), default=-1)
    )


def test_a_piece_that_was_damaged_leaves_again_and_what_was_never_sent_is_a_broken_promise() -> None:
    feeding = RebuildSchedule([Rebuild(0, 1)], 10, 4)
    assert feeding.next_embedded() is None, "a stage has the rows, and sends them"
    sent = [message.position for message in feeding.next_replays("r")]
    assert sent == [0, 4]
    with pytest.raises(InvalidReport):
        feeding.passed(9)
    feeding.passed(4)
    feeding.window.rewind(4)
    assert [(each.position, each.n_tokens) for each in feeding.next_replays("r")] == [(4, 4), (8, 2)]
    feeding.passed(10)
    assert feeding.is_over
    assert feeding.next_embedded() is None
    assert not list(feeding.next_replays("r"))


BROKEN = Assembly(stages("a 0:4", "b 4:8", "c 8:12"), (None, D, None))
HOLDERS = held(a="0:4", b="4:8", c="8:12", d="4:8", e="4:8")


def test_the_standby_takes_the_place_of_a_dead_stage() -> None:
    question = ask(HOLDERS, connected={A, C, D, E})
    repaired = repair_route(question, BROKEN)
    assert repaired == Assembly(stages("a 0:4", "d 4:8", "c 8:12"), (None, E, None))
    # Also where another node would do as well, and comes first by its name.
    other = repair_route(question, replace(BROKEN, standbys=(None, E, None)))
    assert other == Assembly(stages("a 0:4", "e 4:8", "c 8:12"), (None, D, None))


@pytest.mark.parametrize(
    "change",
    [
        {"connected": {C, E}},
        {"connected": {C, D, E}, "avoid": {D}},
        {"connected": {C, D, E}, "full": D},
        {"connected": {C, D, E}, "holders": held(a="0:4", b="4:8", c="8:12", d="0:4", e="4:8")},
        {
            "connected": {C, D, E},
            "constraints": Constraints(pins=(Pin("guide", LayerRange(4, 8), E),)),
        },
    ],
)
def test_where_the_standby_cannot_another_holder_does(change: dict[str, object]) -> None:
    repaired = repair_route(ask(**({"holders": HOLDERS} | change)), BROKEN)  # type: ignore[arg-type]
    assert repaired is not None
    assert repaired.stages == stages("a 0:4", "e 4:8", "c 8:12")


def test_a_neighbour_that_holds_the_range_too_becomes_a_stage_more() -> None:
    holders = held(a="0:4", b="4:8", c="4:8 8:12")
    repaired = repair_route(ask(holders, connected={C}), Assembly(BROKEN.stages, (None, C, None)))
    assert repaired is not None
    assert repaired.stages == stages("a 0:4", "c 4:8", "c 8:12")


@pytest.mark.parametrize(
    "change",
    [
        {"connected": {C}},  # nobody holds the middle
        {"holders": held(a="", b="0:4 4:8 8:12", d="0:4", e="4:12"), "connected": {D, E}},  # none stays
        {"holders": held(a="0:4 0:12", c="8:12", d="4:8"), "slow": (D,)},  # all at home is better now
    ],
)
def test_what_cannot_be_mended_or_is_not_worth_it_is_left(change: dict[str, object]) -> None:
    assert repair_route(ask(**({"holders": HOLDERS} | change)), BROKEN) is None  # type: ignore[arg-type]


def test_a_route_of_another_cut_mends_nothing() -> None:
    holders = held(a="0:4", c="8:12", d="4:6", e="6:8")
    assert repair_route(ask(holders), BROKEN) is None


async def test_a_broken_pipeline_is_mended_and_only_where_that_cannot_be_another_one_is_chosen() -> None:
    pools = {A: FakePool("0:4"), C: FakePool("8:12"), D: FakePool("4:8"), E: FakePool("4:8")}
    async with open_swarm(pools) as swarm:
        routes, entry = swarm[A].pipelines._routes.planner, swarm.entry

        async def choose(broken: Assembly | None) -> list[str]:
            chosen = await routes.choose(entry, RequestSize(), OwnLoad(), (), broken=broken)
            return [stage.node_id for stage in chosen.stages]

        assert await choose(None) == [A, D, C]
        assert await choose(replace(BROKEN, standbys=(None, E, None))) == [A, E, C]
        nobody_stays = Assembly(stages("b 0:6", "f 6:12"), (None, None))
        assert await choose(nobody_stays) == [A, D, C]


SECONDS = st.lists(st.floats(0.0001, 0.02), min_size=4, max_size=4)


@settings(max_examples=40)
@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_holder_that_makes_the_route_shortest_takes_the_place_of_a_dead_stage(
    from_a_s: list[float], to_f_s: list[float], to_g_s: list[float], layer_s: list[float]
) -> None:
    """The ways from and to the two stages beside it count, and no other."""
    able = [node_id_named(letter) for letter in "bcde"]
    f, g = map(node_id_named, "fg")
    question = ask(held(a="0:3", b="3:6", c="3:6", d="3:6", e="3:6", f="6:9", g="9:12"))
    known = replace(
        question.inputs,
        speeds={
            **question.inputs.speeds,
            **{each: NodeSpeed(own_s / 10, own_s / 100) for each, own_s in zip(able, layer_s, strict=True)},
        },
        origin_rtt_s={**question.inputs.origin_rtt_s, **dict(zip(able, from_a_s, strict=True))},
        pair_rtt_s={
            (each, there): seconds
            for there, all_s in ((f, to_f_s), (g, to_g_s))
            for each, seconds in zip(able, all_s, strict=True)
        },
    )

    def route(node_id: NodeId) -> list[RouteStage]:
        pairs = ((A, (0, 3)), (node_id, (3, 6)), (f, (6, 9)), (g, (9, 12)))
        return [RouteStage(each, LayerRange(*layers)) for each, layers in pairs]

    broken = Assembly(stages("a 0:3", "h 3:6", "f 6:9", "g 9:12"), (None,) * 4)
    repaired = repair_route(replace(question, inputs=known), broken)
    assert repaired is not None
    costs_s = {each: route_cost_s(route(each), known) for each in able}
    assert costs_s[repaired.stages[1].node_id] == pytest.approx(min(costs_s.values()))
