from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from gguf import GGUFReader
from gguf_parts import LLAMA, gguf_bytes, string, tensors, write_gguf

import swarmllm.guide
from swarmllm.errors import BadModel
from swarmllm.models import Manifest, build_manifest
from swarmllm.models.manifest import MMPROJ_INDEX

GUIDE = Path(swarmllm.guide.__file__).with_name("guide.gguf")


def _digest(data: bytes) -> str:
    if len(data) <= 2**20:
        return blake3(data).hexdigest()
    chunks = [data[at : at + 2**20] for at in range(0, len(data), 2**20)]
    return blake3(b"".join(blake3(chunk).digest() for chunk in chunks)).hexdigest()


def test_the_bundled_model_is_described_as_ggufs_own_reader_sees_it() -> None:
    manifest = build_manifest(GUIDE)
    reader = GGUFReader(GUIDE)
    theirs = {
        tensor.name: (
            int(tensor.tensor_type),
            tuple(int(n) for n in tensor.shape),
            int(tensor.data_offset),
            _digest(tensor.data.tobytes()),
        )
        for tensor in reader.tensors
    }
    ours = {
        tensor.name: (tensor.ggml_type, tensor.shape, tensor.offset, tensor.blake3)
        for shard in manifest.shards
        for tensor in shard.tensors
    }
    assert ours == theirs
    assert manifest.architecture == "llama"
    assert (manifest.n_layers, manifest.n_embd) == (12, 256)
    assert manifest.n_vocab == len(reader.fields["tokenizer.ggml.tokens"].data)
    assert [shard.kind for shard in manifest.shards] == ["header", "embedding", *["layer"] * 12, "head"]
    assert manifest.size_bytes == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert manifest.cut_alignment == 1
    assert manifest.can_cut_at(5)
    *ends, mmproj = range(2**32 - 4, 2**32)
    assert [shard.index for shard in manifest.shards] == [*ends[:2], *range(12), ends[2]]
    assert mmproj == MMPROJ_INDEX, "the largest u32 is that of no layer"


def test_the_model_id_is_pinned_and_can_be_computed_by_hand(tmp_path: Path) -> None:
    """A change of this id makes every model a stranger to its holders."""
    manifest = build_manifest(write_gguf(tmp_path / "tiny.gguf"))
    lines = manifest.canonical_bytes.decode().splitlines()
    assert lines[:3] == ["swarmllm-model 2", "architecture llama", "layers 2"]
    data = tensors()
    layer = "".join(
        f"tensor blk.1.{part}.weight 0 8 {blake3(data[f'blk.1.{part}.weight']).hexdigest()}\n"
        for part in ("attn_q", "ffn_up")
    )
    assert lines[6] == f"layer 1 {blake3(layer.encode()).hexdigest()}"
    kinds = ["header 4294967292", "embedding 4294967293", "layer 0", "layer 1", "head 4294967294"]
    assert [line.rpartition(" ")[0] for line in lines[3:]] == kinds
    assert manifest.model_id == blake3(manifest.canonical_bytes).hexdigest()
    assert manifest.model_id == "a954b2f449515bb4bf4b27ab1eb32626025d3893b386c356a6a55dc6eb0b34cf"


def test_the_id_does_not_depend_on_how_the_file_is_laid_out(tmp_path: Path) -> None:
    model_id = build_manifest(write_gguf(tmp_path / "a.gguf")).model_id
    turned = dict(reversed(tensors().items()))
    keys = {"general.alignment": 64, **dict(reversed(LLAMA.items()))}
    other = write_gguf(tmp_path / "b.gguf", keys=keys, data=turned, alignment=64, version=2)
    assert build_manifest(other).model_id == model_id


@pytest.mark.parametrize(
    "changed",
    [{"general.name": "Tiny Llama 3"}, {"tokenizer.ggml.tokens": ["a", "b", "d"]}, {"new.key": True}],
)
def test_the_id_depends_on_the_metadata(tmp_path: Path, changed: dict[str, Any]) -> None:
    original = build_manifest(write_gguf(tmp_path / "a.gguf"))
    other = build_manifest(write_gguf(tmp_path / "b.gguf", keys={**LLAMA, **changed}))
    assert other.model_id != original.model_id
    assert [shard.blake3 for shard in other.shards[1:]] == [shard.blake3 for shard in original.shards[1:]]


def test_one_changed_byte_changes_the_id_and_one_shard(tmp_path: Path) -> None:
    original = build_manifest(write_gguf(tmp_path / "a.gguf"))
    data = tensors()
    data["blk.1.ffn_up.weight"] = data["blk.1.ffn_up.weight"][:-1] + b"\x7f"
    other = build_manifest(write_gguf(tmp_path / "b.gguf", data=data))
    assert other.model_id != original.model_id
    changed = [
        shard.kind + str(shard.index)
        for shard, before in zip(other.shards, original.shards, strict=True)
        if shard.blake3 != before.blake3
    ]
    assert changed == ["layer1"]


def test_a_manifest_survives_being_stored(tmp_path: Path) -> None:
    manifest = build_manifest(write_gguf(tmp_path / "a.gguf"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def test_facts_are_taken_from_the_metadata(tmp_path: Path) -> None:
    manifest = build_manifest(write_gguf(tmp_path / "a.gguf"))
    assert (manifest.name, manifest.n_vocab, manifest.context_length) == ("Tiny Llama 2", 3, 64)
    assert not manifest.tied_embedding
    data = tensors()
    del data["output.weight"]
    keys = {key: content for key, content in LLAMA.items() if key != "general.name"}
    other = build_manifest(write_gguf(tmp_path / "some-file.gguf", keys=keys, data=data))
    assert other.tied_embedding
    assert other.name == "some-file"


def test_an_architecture_that_cannot_be_cut_says_why(tmp_path: Path) -> None:
    keys = {key.replace("llama.", "unheard."): content for key, content in LLAMA.items()}
    manifest = build_manifest(
        write_gguf(tmp_path / "a.gguf", keys={**keys, "general.architecture": "unheard"})
    )
    assert manifest.cut_alignment == 0
    assert "unheard" in manifest.whole_reason
    assert manifest.can_cut_at(2)
    assert not manifest.can_cut_at(1)


def test_progress_reaches_the_end_and_its_exception_ends_the_work(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    steps: list[tuple[int, int]] = []
    manifest = build_manifest(path, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (manifest.size_bytes, manifest.size_bytes)
    assert sorted(steps) == steps

    def refuse(done: int, total: int) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        build_manifest(path, refuse)


def without(key: str) -> dict[str, Any]:
    return {name: content for name, content in LLAMA.items() if name != key}


def tensor_head(n_dimensions: int, shape: list[int], kind: int, offset: int, name: str = "blk.0.x") -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", n_dimensions, *shape, kind, offset)


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "other format": (b"PK\3\4" * 20, "magic"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "tensors without end": (gguf_bytes(n_tensors=2**60), "tensor count"),
    "keys without end": (gguf_bytes(n_keys=2**60), "key count"),
    "more keys than there are": (gguf_bytes(n_keys=len(LLAMA) + 1), "GGUF"),
    "string without end": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        "key is 9223372036854775808 bytes",
    ),
    "value without end": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IQ", 8, 2**40),
        "a string of 1099511627776 bytes",
    ),
    "array without end": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 4, 2**40),
        "announces 1099511627776 items",
    ),
    "nested arrays": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 40,
        "unknown or nested type 9",
    ),
    "unknown value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("k") + struct.pack("<I", 77) + b"\0" * 40,
        "unknown value type 77",
    ),
    "key that is no text": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"\xff\n") + b"\0" * 40,
        "printable",
    ),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (string("k") + struct.pack("<II", 4, 1)),
        "appears twice",
    ),
    "no dimensions": (HEAD + tensor_head(0, [], 0, 0) + b"\0" * 64, "0 dimensions"),
    "dimensions without end": (HEAD + tensor_head(2**31, [1, 1], 0, 0) + b"\0" * 64, "dimensions"),
    "empty dimension": (HEAD + tensor_head(2, [8, 0], 0, 0) + b"\0" * 64, "empty dimension"),
    "huge shape": (HEAD + tensor_head(2, [2**62, 2**62], 0, 0) + b"\0" * 64, "truncated: tensor blk.0.x"),
    "unknown tensor type": (HEAD + tensor_head(1, [8], 999, 0) + b"\0" * 64, "unknown ggml type 999"),
    "broken block": (HEAD + tensor_head(1, [9], 8, 0) + b"\0" * 64, "blocks of 32"),
    "unaligned tensor": (HEAD + tensor_head(1, [8], 0, 7) + b"\0" * 64, "not aligned"),
    "offset outside": (HEAD + tensor_head(1, [8], 0, 2**63) + b"\0" * 64, "truncated: tensor"),
    "tensors on top of each other": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 2, 0)
        + tensor_head(1, [8], 0, 0)
        + tensor_head(1, [8], 0, 0, "b")
        + b"\0" * 99,
        "overlaps",
    ),
    "cut short": (gguf_bytes()[:-8], "truncated: tensor output.weight"),
    "odd alignment": (gguf_bytes({**LLAMA, "general.alignment": 33}), "general.alignment"),
    "no architecture": (gguf_bytes(without("general.architecture")), "general.architecture is missing"),
    "architecture is a number": (gguf_bytes({**LLAMA, "general.architecture": 5}), "not a string"),
    "architecture of two lines": (gguf_bytes({**LLAMA, "general.architecture": "a\nb"}), "not a word"),
    "no layers": (gguf_bytes({**LLAMA, "llama.block_count": 0}), "no layers"),
    "layers without end": (gguf_bytes({**LLAMA, "llama.block_count": 2**32 - 1}), "llama.block_count"),
    "a layer is missing": (gguf_bytes({**LLAMA, "llama.block_count": 3}), "layer 2 of 3 has no tensors"),
    "a layer too many": (gguf_bytes({**LLAMA, "llama.block_count": 1}), "beyond the 1 layers"),
    "part of a split": (gguf_bytes({**LLAMA, "split.count": 3}), "one of 3 parts of a model"),
    "width is text": (gguf_bytes({**LLAMA, "llama.embedding_length": "8"}), "llama.embedding_length"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_broken_file_is_refused_with_what_is_wrong(tmp_path: Path, case: str) -> None:
    content, complaint = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModel) as caught:
        build_manifest(path)
    assert complaint in caught.value.message
    assert str(path) in caught.value.message


@pytest.mark.slow
def test_damaged_headers_raise_nothing_but_bad_model(tmp_path: Path) -> None:
    whole = gguf_bytes()
    path = tmp_path / "damaged.gguf"
    random_bytes = random.Random(7)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(random_bytes.randrange(1, 4)):
            damaged[random_bytes.randrange(len(damaged))] = random_bytes.randrange(256)
        path.write_bytes(
            damaged[: random_bytes.randrange(len(damaged))] if random_bytes.random() < 0.2 else damaged
        )
        try:
            build_manifest(path)
        except BadModel:
            refused += 1
    assert refused > 300


def test_a_pipe_a_folder_and_a_missing_file_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, complaint in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "cannot be read|not a regular file"),
        (tmp_path / "missing", "cannot be read"),
    ):
        with pytest.raises(BadModel, match=complaint):
            build_manifest(path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(b"\0")

    with pytest.raises(BadModel, match="was changed while it was read"):
        build_manifest(path, grow)
