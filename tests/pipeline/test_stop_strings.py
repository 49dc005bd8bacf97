"""Whoever asks learns which stop string ended the text, wherever it was sampled."""

from __future__ import annotations

import pytest
from node_ids import A, B, C, D

from bench.common.arithmetic import uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, open_swarm
from .test_survival import PROMPT, SETTINGS, Act, kills, pools_by_id


async def nothing(index: int) -> None:
    pass


async def read(swarm: Swarm, sampling: Sampling, act: Act = nothing) -> tuple[str, Generation]:
    text = ""
    async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
        async for piece in generation:
            assert generation.stop_sequence is None or piece.finish_reason == "stop"
            text += piece.text
            await act(piece.index)
    return text, generation


async def last_word(n_tokens: int) -> str:
    return (await uncut(PROMPT, n_tokens)).split()[-1] + " "


HOLDINGS = [
    {A: "0:12"},
    {A: "", B: "0:12"},
    {A: "0:4", B: "4:8", C: "8:12"},
    {A: "8:12", B: "0:4", C: "4:8"},
    {A: "", B: "0:6", C: "6:12"},
]
SHAPES = ["local", "remote-generate", "chain", "chain", "chain"]


@pytest.mark.parametrize(("holdings", "shape"), list(zip(HOLDINGS, SHAPES, strict=True)), ids=str)
async def test_every_shape_tells_it(holdings: dict[str, str], shape: str) -> None:
    word = await last_word(8)
    async with open_swarm(pools_by_id(holdings), settings=SETTINGS) as swarm:
        text, generation = await read(swarm, Sampling(max_tokens=20, stop=("never", word, "ever")))
        assert text == await uncut(PROMPT, 7)
        assert (generation.shape, generation.finish_reason) == (shape, "stop")
        assert generation.stop_sequence == word
        _, other = await read(swarm, Sampling(max_tokens=3, stop=("never",)))
        assert (other.finish_reason, other.stop_sequence) == ("length", None)
        await swarm.quiet()


@pytest.mark.parametrize(
    "holdings",
    [{A: "0:4", B: "4:8", C: "8:12", D: "8:12"}, {A: "", B: "0:12", C: "0:12"}],
    ids=["chain", "remote-generate"],
)
async def test_it_is_told_after_another_node_went_on(holdings: dict[str, str]) -> None:
    word = await last_word(12)
    async with open_swarm(pools_by_id(holdings), settings=SETTINGS) as swarm:
        victim = (await swarm[A].pipelines.stages_for(swarm.entry))[-1].node_id
        sampling = Sampling(max_tokens=20, stop=("never", word))
        text, generation = await read(swarm, sampling, kills(swarm, victim))
        assert text == await uncut(PROMPT, 11)
        assert (generation.n_recoveries, generation.stop_sequence) == (1, word)
        await swarm.quiet()
