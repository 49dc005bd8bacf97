"""The two committed GGUF files: small enough, complete, quantised, and cut anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from swarmllm.guide import DRAFT_PATH, GUIDE_PATH
from swarmllm.guide.template import SPECIAL_TOKENS, TEMPLATE, TOOL_TAGS

MAX_SIZE_BYTES = 10_000_000


@pytest.fixture(scope="module")
def readers() -> dict[Path, gguf.GGUFReader]:
    return {path: gguf.GGUFReader(path) for path in (GUIDE_PATH, DRAFT_PATH)}


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


@pytest.mark.parametrize("path", [GUIDE_PATH, DRAFT_PATH], ids=["guide", "draft"])
def test_a_file_is_small_enough_to_commit(path: Path) -> None:
    assert path.stat().st_size <= MAX_SIZE_BYTES


@pytest.mark.parametrize("path", [GUIDE_PATH, DRAFT_PATH], ids=["guide", "draft"])
def test_every_matrix_is_quantised_and_every_vector_is_not(
    readers: dict[Path, gguf.GGUFReader], path: Path
) -> None:
    for tensor in readers[path].tensors:
        is_matrix = len(tensor.shape) > 1
        expected = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        assert tensor.tensor_type == expected, tensor.name


def test_the_guide_can_be_cut_in_many_places_and_takes_k_quants(
    readers: dict[Path, gguf.GGUFReader],
) -> None:
    reader = readers[GUIDE_PATH]
    assert value(reader, "general.architecture") == "llama"
    n_layers = value(reader, "llama.block_count")
    assert n_layers >= 8
    for layer in range(n_layers):
        names = {tensor.name for tensor in reader.tensors if tensor.name.startswith(f"blk.{layer}.")}
        assert len(names) == 9
    assert value(reader, "llama.embedding_length") % 256 == 0
    assert value(reader, "llama.feed_forward_length") % 256 == 0
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} <= {t.name for t in reader.tensors}


def test_the_draft_is_small_beside_the_guide_and_shares_its_tokenizer(
    readers: dict[Path, gguf.GGUFReader],
) -> None:
    guide, draft = readers[GUIDE_PATH], readers[DRAFT_PATH]
    assert value(draft, "llama.block_count") <= 2
    assert DRAFT_PATH.stat().st_size * 4 < GUIDE_PATH.stat().st_size
    keys = [key for key in guide.fields if key.startswith("tokenizer.")]
    assert len(keys) > 5
    for key in keys:
        assert value(draft, key) == value(guide, key)


@pytest.mark.parametrize("path", [GUIDE_PATH, DRAFT_PATH], ids=["guide", "draft"])
def test_the_metadata_make_a_chat_model(readers: dict[Path, gguf.GGUFReader], path: Path) -> None:
    reader = readers[path]
    tokens = value(reader, "tokenizer.ggml.tokens")
    kinds = value(reader, "tokenizer.ggml.token_type")
    assert value(reader, "tokenizer.chat_template") == TEMPLATE
    assert tokens[value(reader, "tokenizer.ggml.eos_token_id")] == "<|im_end|>"
    assert value(reader, "tokenizer.ggml.add_bos_token") is False
    assert len(tokens) == len(kinds) == value(reader, "llama.vocab_size")
    for token in SPECIAL_TOKENS:
        kind = gguf.TokenType.USER_DEFINED if token in TOOL_TAGS else gguf.TokenType.CONTROL
        assert kinds[tokens.index(token)] == kind
