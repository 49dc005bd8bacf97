"""Assembly: stages of a pipeline, or words that help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D, node_id_named

from bench.common.arithmetic import FakePool
from swarmllm.errors import InvalidRequest, NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm.pipeline.route.assembly import Affinity, RouteQuery, assemble, plan_route
from swarmllm.scheduling.cheapest import route_cost_s
from swarmllm.scheduling.constraints import Constraints, Pin
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs, Workload
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import Stage

from .fakes import Swarm, open_swarm


def held(**ranges: str) -> dict[str, list[LayerRange]]:
    """By letter of the node."""
    return {
        node_id_named(letter): [LayerRange.parse(text) for text in texts.split()]
        for letter, texts in ranges.items()
    }


def ask(holders: dict[str, list[LayerRange]], alignment: int = 1, **more: Any) -> RouteQuery:
    """Node "a" asks; all are alike, idle and near, but for `slow` and `full` ones."""
    slow, full = more.pop("slow", ()), more.pop("full", ())
    speeds = {
        node_id: NodeSpeed(
            0.01 if node_id in slow else 0.001, 0.0001, lacks="no free slot" if node_id in full else ""
        )
        for node_id in holders
    }
    rtt_s = more.pop("rtt_s", 0.001)
    known = RouteInputs(A, Workload(100, 100), speeds, dict.fromkeys(holders, rtt_s))
    connected = more.pop("connected", frozenset(holders))
    return RouteQuery(12, alignment, holders, connected, known, **{"model_name": "guide", **more})


def stages(*texts: str) -> tuple[Stage, ...]:
    """From "a 0:4"."""
    pairs = [text.split() for text in texts]
    ranges = [(node_id_named(letter), LayerRange.parse(layers)) for letter, layers in pairs]
    return tuple(Stage(node_id=node_id, start=each.start, end=each.end) for node_id, each in ranges)


def test_step_1_the_manifest_says_where_a_model_is_cut() -> None:
    assert assemble(ask(held(a="0:6", b="6:12"), 3)).stages == stages("a 0:6", "b 6:12")
    with pytest.raises(NoPipeline, match="do not respect its cuts"):
        assemble(ask(held(a="0:6", b="6:12"), 4))


@pytest.mark.parametrize(
    ("n_pairs", "listed"),
    [
        (3, "9:10, 10:11, 11:12 do not"),
        (4, "10:11, 11:12 do not"),
        (5, "10:11 and 1 more do not"),
        (7, "and 3 more do not"),
    ],
)
def test_a_refusal_lists_sixteen_ranges_and_counts_the_others(n_pairs: int, listed: str) -> None:
    ranges = [f"{start}:{start + 1}" for start in range(12)] + [
        f"{start}:{start + 2}" for start in range(n_pairs)
    ]
    with pytest.raises(NoPipeline) as refused:
        assemble(ask(held(a=" ".join(ranges)), 12))
    assert f"{listed} respect its cuts (every 12 layers)" in str(refused.value)
    assert str(refused.value).count(":", str(refused.value).index("held ranges")) == min(12 + n_pairs, 16)


def test_a_client_that_names_no_conversation_is_not_remembered() -> None:
    affinity, model_id = Affinity(), ModelId("ab" * 32)
    for session in ("", "one"):
        affinity.remember(model_id, session, stages("a 0:12"))
    assert affinity.previous(model_id, "") == ()
    assert affinity.previous(model_id, "one") == stages("a 0:12")
    assert affinity.previous(ModelId("cd" * 32), "one") == ()


HALVES = held(a="0:6", b="6:12", c="6:12")
LAST_TURN = stages("a 0:6", "c 6:12")


def test_step_2_a_conversation_goes_where_it_was_if_that_is_at_most_half_as_slow_again() -> None:
    assert assemble(ask(HALVES)).stages == stages("a 0:6", "b 6:12")
    again = assemble(ask(HALVES, previous=LAST_TURN))
    assert (again.stages, again.is_reused, again.standbys) == (LAST_TURN, True, (None, B))
    slower = assemble(ask(HALVES, previous=LAST_TURN, slow=(C,)))
    assert (slower.stages, slower.is_reused) == (stages("a 0:6", "b 6:12"), False)


@pytest.mark.parametrize(("times", "is_reused"), [(1.49, True), (1.51, False)])
def test_step_2_half_as_slow_again_is_counted_on_the_whole_route(times: float, is_reused: bool) -> None:
    question = ask(held(b="0:12", c="0:12"), previous=stages("c 0:12"), rtt_s=0.0)
    known = question.inputs
    best_s = route_cost_s((RouteStage(B, LayerRange(0, 12)),), known)
    ends_s = known.entry_s(C) + known.exit_s(C)
    scale = (times * best_s - ends_s) / (best_s - ends_s)
    speeds = {**known.speeds, C: NodeSpeed(0.001 * scale, 0.0001 * scale)}
    slower = replace(question, inputs=replace(known, speeds=speeds))
    assert assemble(slower).is_reused is is_reused


@pytest.mark.parametrize(
    "change",
    [
        {"reachable": {B}},
        {"avoid": {C}},
        {"holders": held(a="0:6", b="6:12", c="0:6")},
        {"constraints": Constraints(pins=(Pin("guide", LayerRange(6, 12), B),))},
    ],
    ids=["gone", "failed", "holds other layers", "not allowed"],
)
def test_step_2_a_last_pipeline_that_is_no_longer_possible_is_forgotten(change: dict[str, Any]) -> None:
    question = replace(ask(HALVES, previous=LAST_TURN), **change)
    assembly = assemble(question)
    assert (assembly.stages, assembly.is_reused) == (stages("a 0:6", "b 6:12"), False)


def test_step_2_a_last_pipeline_of_which_a_node_is_full_is_not_waited_for() -> None:
    assert not assemble(ask(HALVES, previous=LAST_TURN, full=(C,))).is_reused


def test_step_3_a_node_that_has_failed_is_no_holder() -> None:
    assert assemble(ask(held(b="0:12", c="0:12"), avoid={B})).stages == stages("c 0:12")
    with pytest.raises(NoPipeline):
        assemble(ask(held(b="0:12", c="0:12"), avoid={B, C}))


def test_step_4_only_who_is_connected_lives_whatever_records_say() -> None:
    question = ask(held(b="0:12", c="0:12"))
    assert assemble(replace(question, reachable={C})).stages == stages("c 0:12")
    with pytest.raises(NoPipeline, match="no reachable node holds layers 0:12"):
        assemble(replace(question, reachable=()))
    assert assemble(replace(ask(held(a="0:12")), reachable=())).stages == stages("a 0:12")


def test_a_plan_is_made_of_who_is_connected_too() -> None:
    question = ask(held(b="0:12", c="0:12"))
    plan = plan_route(replace(question, reachable={C}))
    assert [stage.node_id for stage in plan.stages] == [C]
    assert not plan.stages[0].alternatives
    with pytest.raises(NoPipeline, match="no reachable node holds layers 0:12"):
        plan_route(replace(question, reachable=()))


def test_step_5_load_and_latency_count() -> None:
    assert assemble(ask(held(b="0:12", c="0:12"), slow=(B,))).stages == stages("c 0:12")
    assert assemble(ask(held(b="0:12", c="0:12"), full=(B,))).stages == stages("c 0:12")


def test_step_6_a_split_that_is_slower_than_home_is_not_chosen() -> None:
    split = held(a="0:6 0:12", b="6:12")
    far, near = ask(split, slow=(A,), rtt_s=0.5), ask(split, slow=(A,), rtt_s=0.001)
    assert assemble(far).stages == stages("a 0:12")
    assert assemble(near).stages == stages("a 0:6", "b 6:12")


def test_step_7_a_private_pipeline_begins_and_ends_at_home() -> None:
    question = ask(
        held(a="0:2 10:12", b="2:10", c="0:12"), slow=(A,), constraints=Constraints(is_private=True)
    )
    assert assemble(question).stages == stages("a 0:2", "b 2:10", "a 10:12")
    assert assemble(replace(question, constraints=Constraints())).stages == stages("c 0:12")
    of_some = Constraints(private_models=frozenset({"guide"}))
    assert assemble(replace(question, constraints=of_some)).stages == stages("a 0:2", "b 2:10", "a 10:12")
    other = replace(question, constraints=of_some, model_name="other")
    assert assemble(other).stages == stages("c 0:12")
    # Of a node that holds everything the middle is used, and home runs all that it holds of the ends.
    everything = replace(question, holders=held(a="0:2 9:12", c="0:12"))
    assert assemble(everything).stages == stages("a 0:2", "c 2:9", "a 9:12")
    overlapping = replace(question, holders=held(a="0:4 8:12", b="2:10"))
    assert assemble(overlapping).stages == stages("a 0:4", "b 4:8", "a 8:12")
    with pytest.raises(NoPipeline, match=r"private: the ends stay at home.*holds layers 11:12"):
        assemble(ask(held(a="0:2", b="2:12"), constraints=Constraints(is_private=True)))
    with pytest.raises(NoPipeline, match=r"private: the ends stay at home.*holds layers 0:1 of"):
        assemble(ask(held(a="10:12", b="0:10"), constraints=Constraints(is_private=True)))


def test_step_7_pinned_layers_run_where_they_are_pinned_and_only_of_that_model() -> None:
    pins = (Pin.parse(f"guide:6:8@{C}"),)
    assert assemble(ask(HALVES, constraints=Constraints(pins=pins))).stages == LAST_TURN
    other = ask(HALVES, constraints=Constraints(pins=pins), model_name="other")
    assert assemble(other).stages == stages("a 0:6", "b 6:12")
    around = ask(held(a="0:12", c="4:9"), constraints=Constraints(pins=pins))
    assert assemble(around).stages == stages("a 0:6", "c 6:8", "a 8:12")
    with pytest.raises(NoPipeline, match="pinned to another node"):
        assemble(ask(held(a="0:12"), constraints=Constraints(pins=pins)))


@pytest.mark.parametrize(
    "text",
    [
        "guide:0:4",
        f"guide@{B}",
        "guide:0:4@",
        f"guide:4:0@{B}",
        f":0:4@{B}",
        "@",
        "guide:0:4@x",
        f"guide:0:4@{B}x",
    ],
)
def test_a_pin_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Pin.parse(text)


def test_step_8_ranges_of_one_node_that_meet_are_one_stage() -> None:
    assert assemble(ask(held(a="0:4 4:8", b="8:12"))).stages == stages("a 0:8", "b 8:12")


def test_step_9_every_stage_has_the_best_other_holder_with_room_as_its_standby() -> None:
    holders = held(a="0:6", b="6:12", c="6:12", d="0:6 6:12")
    assembly = assemble(ask(holders, slow=(C, D), full=()))
    assert (assembly.stages, assembly.standbys) == (stages("a 0:6", "b 6:12"), (D, C))
    assert assemble(ask(holders, slow=(C, D), full=(C,))).standbys == (D, D)
    assert assemble(ask(holders, slow=(C, D), full=(C, D))).standbys == (None, None)


@pytest.mark.parametrize(
    ("alignment", "holders", "reason"),
    [
        (1, held(a="0:4", b="6:12"), r"guide cannot run now: no reachable node holds layers 4:6 of 0:12"),
        (1, held(), r"no reachable node holds layers 0:12 of 0:12"),
        (1, held(a="2:4", b="6:8"), r"layers 0:2, 4:6, 8:12 of 0:12"),
        (
            0,
            held(a="0:6", b="6:12"),
            r"no reachable node holds all its layers \(0:12\), and it cannot be cut",
        ),
        (4, held(a="0:6", b="6:12"), r"the held ranges 0:6, 6:12 do not respect its cuts \(every 4 layers\)"),
    ],
)
def test_what_is_missing_is_named(alignment: int, holders: dict[str, list[LayerRange]], reason: str) -> None:
    with pytest.raises(NoPipeline, match=reason):
        assemble(ask(holders, alignment))


@pytest.mark.parametrize(
    ("alignment", "holders", "command"),
    [
        (1, held(a="0:4", b="6:12"), "`swarmllm models load guide --layers 4:6` loads these layers on"),
        (
            1,
            held(a="2:4", b="6:8"),
            "`swarmllm models load guide --layers 0:2` loads the first of these layers",
        ),
        (1, held(), "`swarmllm models load guide` loads all of it on this node; `swarmllm share guide` dist"),
        (0, held(a="0:6", b="6:12"), "`swarmllm models load guide` loads all of it"),
        (4, held(a="0:8", b="9:12"), "`swarmllm models load guide --layers 8:12` loads these layers"),
    ],
)
def test_what_would_mend_it_is_named(
    alignment: int, holders: dict[str, list[LayerRange]], command: str
) -> None:
    with pytest.raises(NoPipeline) as caught:
        assemble(ask(holders, alignment))
    assert command in caught.value.message


def test_ranges_that_overlap_are_a_complete_model() -> None:
    holders = held(a="0:8", b="4:12")
    assert assemble(ask(holders, slow=(A,))).stages == stages("a 0:4", "b 4:12")
    assert assemble(ask(holders, slow=(B,))).stages == stages("a 0:8", "b 8:12")
    assert assemble(ask(holders, 4, slow=(A,))).stages == stages("a 0:4", "b 4:12")


def test_more_stages_than_a_request_carries_are_no_route() -> None:
    holders = {node_id_named(f"n{i}"): [LayerRange(i, i + 1)] for i in range(257)}
    with pytest.raises(NoPipeline, match="make no route of 256 stages or fewer"):
        assemble(replace(ask(holders), n_layers=257))


async def test_step_10_a_conversation_returns_to_its_pipeline_while_it_lives() -> None:
    """Nodes b and c are alike; whoever answered first answers again, until it is gone."""
    async with open_swarm({A: FakePool(), B: FakePool("0:12"), C: FakePool("0:12")}) as swarm:
        pipelines = swarm[A].pipelines

        async def turn() -> str:
            prompt = Prompt(text="hello", session="talk")
            async with pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=3)) as generation:
                async for _ in generation:
                    pass
                return generation.route[0].node_id

        first = await turn()
        other = C if first == B else B
        # Whoever has run before is measured, so the other one now looks as good or better.
        assert [await turn() for _ in range(3)] == [first] * 3
        swarm.network.cut(A, first)
        await _until_forgotten(swarm, first)
        assert await turn() == other


async def test_only_connected_holders_are_used() -> None:
    async with open_swarm({A: FakePool(), B: FakePool("0:12"), C: FakePool("0:12")}) as swarm:
        pipelines = swarm[A].pipelines
        first = (await pipelines.stages_for(swarm.entry))[0].node_id
        swarm.network.cut(A, first)
        assert swarm[A].registry.node(first) is not None
        await _until_forgotten(swarm, first)
        second = (await pipelines.stages_for(swarm.entry))[0].node_id
        assert {first, second} == {B, C}
        swarm.network.cut(A, second)
        await _until_forgotten(swarm, second)
        with pytest.raises(NoPipeline):
            await pipelines.stages_for(swarm.entry)


async def _until_forgotten(swarm: Swarm, node_id: str) -> None:
    with trio.fail_after(DEADLINE_S):
        while node_id in swarm[A].registry.reachable():
            await trio.lowlevel.checkpoint()
