from __future__ import annotations

from struct import pack

import numpy as np
import pytest
from blake3 import blake3
from block_names import block_hashes
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, root_hash

MODEL = "ab" * 32
prompts = st.lists(st.integers(0, 2**32 - 1), max_size=4 * BLOCK_TOKENS)


def test_hashes_follow_their_definition() -> None:
    tokens = list(range(1000, 1000 + 130))
    root = blake3(b"swarmllm block 1" + bytes.fromhex(MODEL) + pack("<II", 4, 12)).digest()
    first = blake3(root + pack("<64I", *tokens[:64])).digest()
    second = blake3(first + pack("<64I", *tokens[64:128])).digest()
    assert block_hashes(MODEL, 4, 12, tokens) == (first, second)


@given(prompts, prompts)
def test_two_prompts_share_exactly_the_blocks_of_their_common_prefix(a: list[int], b: list[int]) -> None:
    # Independent prompts hardly ever share a block, so the second continues the first.
    b = a[: len(a) // 2] + b
    n_same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    hashes_a, hashes_b = block_hashes(MODEL, 0, 4, a), block_hashes(MODEL, 0, 4, b)
    shared = [x == y for x, y in zip(hashes_a, hashes_b, strict=False)]
    assert shared == [(i + 1) * BLOCK_TOKENS <= n_same for i in range(len(shared))]


@given(prompts, st.integers(0, 4))
def test_chain_can_be_extended_block_by_block(tokens: list[int], n_blocks: int) -> None:
    n_blocks = min(n_blocks, len(tokens) // BLOCK_TOKENS)
    whole = block_hashes(MODEL, 0, 4, tokens)
    previous = whole[n_blocks - 1] if n_blocks else root_hash(MODEL, 0, 4)
    rest = extend_block_hashes(previous, np.array(tokens[n_blocks * BLOCK_TOKENS :], np.int64))
    assert whole == whole[:n_blocks] + rest


def test_model_and_layer_range_are_part_of_the_name() -> None:
    tokens = [1] * BLOCK_TOKENS
    names = [
        block_hashes(MODEL, 0, 4, tokens),
        block_hashes("cd" * 32, 0, 4, tokens),
        block_hashes(MODEL, 0, 5, tokens),
        block_hashes(MODEL, 1, 4, tokens),
    ]
    assert len(set(names)) == len(names)


def test_incomplete_block_has_no_name() -> None:
    assert block_hashes(MODEL, 0, 4, [1] * (BLOCK_TOKENS - 1)) == ()


@pytest.mark.parametrize("tokens", [[-1], [2**32], [[1, 2]]])
def test_tokens_that_cannot_be_hashed_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        block_hashes(MODEL, 0, 4, tokens)


def test_model_id_must_be_whole() -> None:
    with pytest.raises(ValueError, match="64 hex digits"):
        root_hash("ab", 0, 4)
