"""What a segment file holds, and how segment files are kept."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.models.segment_copies import SegmentCopies
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.engine.segment_file import DUMMY_VOCABULARY, cut
from swarmllm_workers.engine.segment_maker import SegmentCache
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

from .conftest import MakeModel
from .factory import N_VOCAB, SPECS, Spec, build


def cut_file(path: Path, start: int, end: int, target: Path) -> GGUFReader:
    source = GgufFile(path)
    cut(source, ARCHITECTURES[source.text("general.architecture")], start, end, target)
    return GGUFReader(target)


def value(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def test_segment_without_head_holds_its_layers_and_a_dummy_vocabulary(
    make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model("qwen2")
    segment = cut_file(path, 1, 3, tmp_path / "segment.gguf")
    source = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    got = {tensor.name: tensor for tensor in segment.tensors}
    for name, tensor in got.items():
        if name.startswith("blk."):
            _, index, rest = name.split(".", 2)
            original = source[f"blk.{int(index) + 1}.{rest}"]
            assert tensor.data.tobytes() == original.data.tobytes(), name
            assert tensor.tensor_type == original.tensor_type
    n_per_layer = sum(name.startswith("blk.0.") for name in source)
    assert sum(name.startswith("blk.") for name in got) == 2 * n_per_layer
    assert got["token_embd.weight"].shape.tolist() == [64, DUMMY_VOCABULARY]
    assert got["output.weight"].shape.tolist() == [64, DUMMY_VOCABULARY]
    assert value(segment, "qwen2.block_count") == 2
    assert value(segment, "qwen2.vocab_size") == DUMMY_VOCABULARY
    assert value(segment, "qwen2.attention.head_count") == [4, 4]
    assert not any(key.startswith("tokenizer.ggml.t") for key in segment.fields)
    assert "general.tags" not in segment.fields


def test_embedding_of_the_head_segment_is_a_hole_unless_tied(make_model: MakeModel, tmp_path: Path) -> None:
    wide = build(tmp_path / "wide.gguf", Spec("llama", n_embd=4096, n_ff=32, n_layers=2))
    target = tmp_path / "head.gguf"
    reader = cut_file(wide, 1, 2, target)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["token_embd.weight"].shape.tolist() == [4096, N_VOCAB]
    assert not tensors["token_embd.weight"].data.any()
    assert target.stat().st_blocks * 512 < target.stat().st_size - 0.9 * tensors["token_embd.weight"].n_bytes
    tied = cut_file(make_model("llama-tied"), 1, 4, tmp_path / "tied.gguf")
    source = {tensor.name: tensor for tensor in GGUFReader(make_model("llama-tied")).tensors}
    embedding = next(tensor for tensor in tied.tensors if tensor.name == "token_embd.weight")
    assert embedding.data.tobytes() == source["token_embd.weight"].data.tobytes()


def test_dense_layers_at_the_front_are_counted_from_the_segments_start(tmp_path: Path) -> None:
    path = build(tmp_path / "m.gguf", Spec("llama", keys={"leading_dense_block_count": 2}))
    for (start, end), expected in {(0, 1): 1, (0, 4): 2, (1, 4): 1, (2, 4): 0, (3, 4): 0}.items():
        reader = cut_file(path, start, end, tmp_path / f"{start}-{end}.gguf")
        assert value(reader, "llama.leading_dense_block_count") == expected


def test_sliding_windows_keep_to_their_layers(make_model: MakeModel, tmp_path: Path) -> None:
    """gemma3: every sixth layer attends to everything."""
    key = "gemma3.attention.sliding_window_pattern"
    path = make_model("gemma3")
    assert value(cut_file(path, 4, 8, tmp_path / "a.gguf"), key) == [1, 0, 1, 1]
    for (start, end), period in {(0, 12): 6, (4, 6): 2, (3, 6): 3, (6, 11): 0, (5, 6): None}.items():
        fields = cut_file(path, start, end, tmp_path / f"{start}-{end}.gguf").fields
        assert (fields[key].contents() if key in fields else None) == period  # every release reads numbers
    dense = cut_file(path, 5, 6, tmp_path / "b.gguf")
    assert "gemma3.attention.sliding_window" not in dense.fields


def test_cut_outside_of_the_model_is_refused_and_leaves_no_file(
    make_model: MakeModel, tmp_path: Path
) -> None:
    for start, end in ((0, 5), (3, 3), (-1, 2)):
        with pytest.raises(CallError) as caught:
            cut_file(make_model("llama"), start, end, tmp_path / "segment.gguf")
        assert caught.value.kind == "cannot_cut"
    assert list(tmp_path.iterdir()) == []


def test_source_that_shrinks_while_it_is_cut_leaves_no_file(make_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make_model("llama").read_bytes())
    source = GgufFile(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CallError, match="shorter"):
        cut(source, ARCHITECTURES["llama"], 0, 3, tmp_path / "segment.gguf")
    assert list(tmp_path.iterdir()) == [path]


def test_segment_file_is_cut_once_and_again_when_the_source_changes(
    make_model: MakeModel, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make_model("llama").read_bytes())
    cuts: list[int] = []

    def ensure() -> Path:
        cache = SegmentCache(tmp_path / "cache", GgufFile(path))
        return cache.ensure(ARCHITECTURES["llama"], 0, 2, lambda done, total: cuts.append(done))

    first = ensure()
    n_reports = len(cuts)
    assert n_reports > 0
    assert ensure() == first
    assert len(cuts) == n_reports
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert ensure() != first
    assert len(cuts) > n_reports
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".gguf", ".gguf"]


def test_the_daemon_leaves_a_copy_that_a_model_runs_from(make_model: MakeModel, tmp_path: Path) -> None:
    cache = SegmentCache(tmp_path, GgufFile(make_model("llama")))
    path = cache.ensure(ARCHITECTURES["llama"], 0, 1)
    model = Model(path)
    os.utime(path, (0, 0))
    copies = SegmentCopies(tmp_path, 0)
    assert copies.tidy() == 0
    model.close()
    os.utime(path, (0, 0))
    assert copies.tidy() == 1
    assert not path.exists()
    assert cache.ensure(ARCHITECTURES["llama"], 0, 1) == path, "it is cut again"
    assert copies.tidy() == 0, "a file just cut was removed"


def test_reader_agrees_with_gguf_py(make_model: MakeModel) -> None:
    for name in SPECS:
        ours, theirs = GgufFile(make_model(name)), GGUFReader(make_model(name))
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert (info.offset, info.size_bytes) == (tensor.data_offset, tensor.n_bytes)
            assert info.shape == tuple(tensor.shape.tolist())
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert list(ours.values) == keys


@pytest.fixture(scope="module")
def model_bytes(make_model: MakeModel) -> bytes:
    return make_model("llama").read_bytes()


@settings(max_examples=60)
@given(st.data())
def test_damaged_header_is_refused_or_read_but_never_crashes(
    model_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(
        model_bytes[: data.draw(st.integers(4, 9000))] if data.draw(st.booleans()) else model_bytes
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(9000, len(damaged) - 1)))
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    kinds = set()
    try:
        GgufFile(path).close()
    except CallError as error:
        kinds.add(error.kind)
    assert kinds <= {"bad_model"}


def test_announced_sizes_are_not_believed(model_bytes: bytes, tmp_path: Path) -> None:
    """Counts of 2**63 in the places where a length stands."""
    path = tmp_path / "m.gguf"
    huge = np.uint64(2**63).tobytes()
    first_key = 24
    for at in (8, 16, first_key):
        path.write_bytes(model_bytes[:at] + huge + model_bytes[at + 8 :])
        with pytest.raises(CallError) as caught:
            GgufFile(path)
        assert caught.value.kind == "bad_model"
