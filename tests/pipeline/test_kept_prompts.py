"""Which prompts' KV an origin has fetched before it is needed."""

from __future__ import annotations

import numpy as np
from node_ids import A, B

from bench.common.arithmetic import fake_entry
from swarmllm.pipeline.prefix.kept_prompts import PROMPTS_MAX, PROMPTS_S, KeptPrompt, KeptPrompts
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.swarm import Stage

ENTRY = fake_entry()
STAGES = (Stage(node_id=A, start=0, end=4), Stage(node_id=B, start=4, end=12))
TOKENS = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)


def kept(first: int = 0, n_tokens: int = len(TOKENS), computed_s: float = 0.0) -> KeptPrompt:
    return KeptPrompt(ENTRY, TOKENS[:n_tokens] + first, STAGES, computed_s)


def everything(prompt: KeptPrompt) -> bool:
    return True


def test_the_latest_prompts_are_remembered_the_last_one_first() -> None:
    prompts = KeptPrompts()
    for first in range(PROMPTS_MAX + 3):
        prompts.completed(kept(first))
    found = prompts.of(everything, 1.0)
    assert [int(each.tokens[0]) for each in found] == list(range(PROMPTS_MAX + 2, 2, -1))
    assert [*prompts.of(lambda each: each.tokens[0] == 4, 1.0)] == [found[-2]]


def test_a_prompt_that_goes_on_takes_the_place_of_its_beginning() -> None:
    prompts = KeptPrompts()
    for prompt in (kept(n_tokens=100), kept(first=1, n_tokens=100), kept()):
        prompts.completed(prompt)
    assert [len(each.tokens) for each in prompts.of(everything, 1.0)] == [len(TOKENS), 100]


def test_nothing_is_remembered_that_is_too_short_too_old_or_dropped() -> None:
    prompts = KeptPrompts()
    prompts.completed(kept(n_tokens=BLOCK_TOKENS))
    assert len(prompts) == 0
    prompts.completed(kept(n_tokens=BLOCK_TOKENS + 1))
    prompts.completed(kept(first=1, computed_s=5.0))
    (older, newer) = reversed(prompts.of(everything, 1.0))
    assert prompts.of(everything, PROMPTS_S) == [newer]
    prompts.drop(older)
    prompts.drop(newer)
    assert len(prompts) == 0
