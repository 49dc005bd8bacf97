"""Assembly: stages of a pipeline, or words that help."""

from __future__ import annotations

import pytest
import trio

from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.assembly import assemble
from swarmllm_proto.swarm import Stage

from .fakes import FakePool, Swarm, open_swarm


def held(**ranges: str) -> dict[str, list[LayerRange]]:
    return {node_id: [LayerRange.parse(text) for text in texts.split()] for node_id, texts in ranges.items()}


def test_the_route_becomes_stages() -> None:
    assert assemble(12, 1, held(a="0:4 4:8", b="8:12"), "a") == (
        Stage(node_id="a", start=0, end=8),
        Stage(node_id="b", start=8, end=12),
    )


def test_a_node_to_avoid_is_not_used() -> None:
    assert assemble(12, 1, held(a="0:12", b="0:12"), "o", avoid={"a"})[0].node_id == "b"
    with pytest.raises(NoPipeline):
        assemble(12, 1, held(a="0:12", b="0:12"), "o", avoid={"a", "b"})


@pytest.mark.parametrize(
    ("alignment", "holders", "reason"),
    [
        (1, held(a="0:4", b="6:12"), r"guide cannot run now: no connected node holds layers 4:6 of 0:12"),
        (1, held(), r"no connected node holds layers 0:12 of 0:12"),
        (1, held(a="2:4", b="6:8"), r"layers 0:2, 4:6, 8:12 of 0:12"),
        (1, held(a="0:8", b="4:12"), r"the held ranges 0:8, 4:12 share no boundaries that lead from 0 to 12"),
        (
            0,
            held(a="0:6", b="6:12"),
            r"no connected node holds all its layers \(0:12\), and it cannot be cut",
        ),
        (4, held(a="0:6", b="6:12"), r"the held ranges 0:6, 6:12 do not respect its cuts \(every 4 layers\)"),
    ],
)
def test_what_is_missing_is_named(alignment: int, holders: dict[str, list[LayerRange]], reason: str) -> None:
    with pytest.raises(NoPipeline, match=reason):
        assemble(12, alignment, holders, "a", model_name="guide")


async def test_only_connected_holders_are_used() -> None:
    async with open_swarm({"a": FakePool(), "b": FakePool("0:12"), "c": FakePool("0:12")}) as swarm:
        pipelines = swarm["a"].pipelines
        assert pipelines.stages_for(swarm.entry)[0].node_id == "b"
        swarm.network.cut("a", "b")
        assert swarm["a"].registry.node("b") is not None
        await _until_forgotten(swarm, "b")
        assert pipelines.stages_for(swarm.entry)[0].node_id == "c"
        swarm.network.cut("a", "c")
        await _until_forgotten(swarm, "c")
        with pytest.raises(NoPipeline):
            pipelines.stages_for(swarm.entry)


async def _until_forgotten(swarm: Swarm, node_id: str) -> None:
    with trio.fail_after(5):
        while node_id in swarm["a"].registry.connected():
            await trio.lowlevel.checkpoint()
