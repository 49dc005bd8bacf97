"""The text of an answer and its end are this node's own, whatever a last stage elsewhere says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_ids import A, B, C, D

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import WorkerError
from swarmllm.pipeline.origin.detokenizer import GROUP_TOKENS, MODELS_MAX, TokenBytes
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling, Token
from swarmllm_proto.tensors import Tensor

from .fakes import computes, open_swarm
from .test_stop_strings import read
from .test_survival import PROMPT, SETTINGS


class Liar(FakePool):
    """Says this of its third token, and `text` for each piece."""

    text: bytes | None = None

    def __init__(self, layers: str, **reported: Any) -> None:
        super().__init__(layers)
        self.reported = reported

    def _sample(self, slot: Any, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        token, piece = super()._sample(slot, request_id, row)
        piece = piece if self.text is None else self.text
        return (msgspec.structs.replace(token, **self.reported), b"") if token.index == 2 else (token, piece)


LIARS: dict[str, dict[str, Any]] = {
    "a stop string that did not come": {"finish_reason": "stop", "stopped_by": 0},
    "a token that ends no text": {"finish_reason": "stop"},
    "on after a stop string": {"finish_reason": None, "stopped_by": None},
    "on after the end": {"finish_reason": None},
}


@pytest.mark.parametrize("is_whole", [False, True], ids=["chain", "remote-generate"])
@pytest.mark.parametrize("lie", LIARS)
async def test_who_lies_about_the_end_is_charged_and_ends_no_text(lie: str, is_whole: bool) -> None:
    words = (await uncut(PROMPT, 8)).split()
    layers, n_right = "0:12" if is_whole else "8:12", 7
    # The last one would be found if a token that was refuted counted.
    stop: tuple[str, ...] = ("never", words[7] + " ", f"{words[2]} {words[2]} ")
    pools = {C: Liar(layers, **LIARS[lie]), D: FakePool(layers)}
    pools |= {A: FakePool()} if is_whole else {A: FakePool("0:4"), B: FakePool("4:8")}
    ends: frozenset[int] = frozenset()
    if lie == "on after a stop string":
        stop, n_right = ("never", words[2] + " "), 2
    elif lie == "on after the end":
        stop, n_right, ends = (), 3, frozenset({int(words[2])})
    for pool in pools.values():
        pool.ends = ends
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await swarm.tell(A, {C: computes(swarm.entry.model_id, 1e-6), D: computes(swarm.entry.model_id, 1.0)})
        text, generation = await read(swarm, Sampling(max_tokens=20, stop=stop))
        assert text == await uncut(PROMPT, n_right)
        assert (generation.n_recoveries, generation.finish_reason) == (1, "stop")
        assert generation.stop_sequence == (stop[1] if stop else None)
        trust = swarm[A].trust
        assert trust.explain(C).counts == {"broke protocol": 1}
        assert trust.score(C) < NEUTRAL <= min(trust.score(each) for each in pools if each not in (A, C))
        for _ in range(3):
            _, again = await read(swarm, Sampling(max_tokens=20, stop=stop))
            assert again.n_recoveries == 0
            assert C not in {stage.node_id for stage in again.route}
        await swarm.quiet()


@pytest.mark.parametrize("is_whole", [False, True], ids=["chain", "remote-generate"])
@pytest.mark.parametrize("reported", [b"", b"lies ", b"\xff"])
async def test_what_the_stage_says_of_the_text_is_not_shown(reported: bytes, is_whole: bool) -> None:
    liar = Liar("0:12" if is_whole else "8:12")
    liar.text = reported
    pools = {A: FakePool(), C: liar} if is_whole else {A: FakePool("0:4"), B: FakePool("4:8"), C: liar}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        word = (await uncut(PROMPT, 8)).split()[-1] + " "
        text, generation = await read(swarm, Sampling(max_tokens=7, stop=("never", word + "x", "393")))
        assert text == (await uncut(PROMPT, 7)).removesuffix(" ") + " "
        assert (generation.n_recoveries, generation.finish_reason) == (0, "length")
        await swarm.quiet()


class Forgetful(FakePool):
    """Its worker cannot say at first what tokens mean."""

    n_calls = 0

    async def pieces(self, model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]:
        self.n_calls += 1
        if self.n_calls < 4:
            raise WorkerError("gone")
        return await super().pieces(model, tokens)


async def test_without_a_worker_that_says_it_the_text_is_the_stages() -> None:
    """And it is made up for when there is one."""
    liar = Liar("8:12")
    liar.text = b"lies "
    forgetful = Forgetful("0:4")
    pools = {A: forgetful, B: FakePool("4:8"), C: liar}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        text, generation = await read(swarm, Sampling(max_tokens=7))
        words = (await uncut(PROMPT, 7)).split()
        assert text == "lies lies " + "".join(f"{word} " for word in words[3:])
        assert generation.n_recoveries == 0
        assert forgetful.n_calls == 4
        text, _ = await read(swarm, Sampling(max_tokens=7))
        assert text == await uncut(PROMPT, 7)
        assert forgetful.n_calls == 4
        await swarm.quiet()


class Numbers:
    """A vocabulary in which each token is its number."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def pieces(self, model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]:
        self.asked.append((int(tokens[0]), len(tokens)))
        return tuple(str(token).encode() for token in tokens)

    async def end_tokens(self, model: ModelFile) -> frozenset[int]:
        self.asked.append((-1, 0))
        return frozenset({3})


async def test_a_worker_is_asked_once_for_each_group_of_tokens() -> None:
    numbers = Numbers()
    pieces = TokenBytes(numbers)
    models = [ModelFile(f"{number:064x}", Path("/nowhere")) for number in range(MODELS_MAX + 1)]
    for token in (0, GROUP_TOKENS - 1, GROUP_TOKENS, 0, GROUP_TOKENS + 4):
        assert await pieces.of(models[0], token, GROUP_TOKENS + 5) == str(token).encode()
    assert numbers.asked == [(0, GROUP_TOKENS), (GROUP_TOKENS, 5)]
    assert [await pieces.end(models[0], token) for token in (2, 3)] == [False, True]
    assert numbers.asked.pop() == (-1, 0)
    for model in models[1:]:
        await pieces.of(model, 3, 10)
    # The first one has been forgotten, the last ones have not.
    for model in (models[-1], models[0]):
        await pieces.of(model, 3, 10)
    assert numbers.asked[2:] == [(0, 10)] * (MODELS_MAX + 1)
    assert await pieces.end(models[0], 3)
    assert numbers.asked.pop() == (-1, 0)
