"""A model in several files computes what it computes in one: whole, and cut from parts that have a range."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from split_gguf import split_gguf

from swarmllm.models import Catalogue
from swarmllm.models.verification import segments_of
from swarmllm_proto import ipc
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile, open_source

from .client import GREEDY, Worker
from .conftest import MakeModel
from .factory import Spec, build
from .test_exactness import chain_logits, open_engine, tokens_for, uncut_logits

CHUNKING = [7, 33]
MIXED = Spec(
    "llama",
    n_layers=8,
    n_embd=512,
    n_heads=8,
    n_kv_heads=4,
    head_size=64,
    n_ff=1536,
    types=(Type.F16,),
    embedding_type=Type.F16,
)


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quantised by llama.cpp itself, which gives more bits to some layers' values and down projections."""
    folder = tmp_path_factory.mktemp("q4_k_m")
    path = folder / "mixed.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    source = build(folder / "f16.gguf", MIXED)
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) == 0
    types = {each.name: each.type for each in GgufFile(path).tensors.values()}
    assert {types[f"blk.{layer}.ffn_down.weight"] for layer in range(8)} == {Type.Q4_K, Type.Q6_K}
    return path


def assert_same_numbers(path: Path, original: Path, folder: Path, all_bounds: list[list[int]]) -> None:
    engine = open_engine(path, folder)
    tokens = tokens_for(engine.n_vocab)
    expected = uncut_logits(original, tokens, CHUNKING)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    for bounds in all_bounds:
        for start, end in pairwise(bounds):
            engine.layers.load(start, end)
        assert np.abs(chain_logits(engine, bounds, tokens, CHUNKING) - expected).max() == 0.0, bounds
        engine.layers.unload(0, engine.n_layers)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("n_parts", [1, 3])
def test_a_mixture_of_quantisations_is_cut_bit_for_bit(q4_k_m: Path, tmp_path: Path, n_parts: int) -> None:
    n_tensors = len(GgufFile(q4_k_m).tensors)
    boundaries = [n_tensors * each // n_parts for each in range(1, n_parts)]
    path = split_gguf(q4_k_m, tmp_path, boundaries)[0] if boundaries else q4_k_m
    assert_same_numbers(path, q4_k_m, tmp_path, [[0, 8], [0, 4, 8], [0, 1, 3, 7, 8], list(range(9))])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2moe", "gemma3"])
def test_parts_with_odd_boundaries_compute_the_same(name: str, make_model: MakeModel, tmp_path: Path) -> None:
    original = make_model(name)
    n_tensors = len(GgufFile(original).tensors)
    for boundaries in ([0], [1, n_tensors // 3, n_tensors // 2 + 1, n_tensors], [0, n_tensors - 1]):
        folder = tmp_path / f"{len(boundaries)}-{boundaries[-1]}"
        folder.mkdir()
        path = split_gguf(original, folder, boundaries)[0]
        engine = open_engine(path, tmp_path)
        middle = 6 if engine.n_layers == 12 else 2
        engine.close()
        bounds = [[0, engine.n_layers], [0, middle, engine.n_layers]]
        assert_same_numbers(path, original, folder, bounds)


@pytest.mark.slow
def test_a_worker_process_runs_a_model_of_four_parts(
    worker: Worker, make_model: MakeModel, tmp_path: Path
) -> None:
    original = make_model("llama")
    parts = split_gguf(original, tmp_path, [0, 9, 20])
    opened = worker.open(parts[0], (0, 1), (1, 4))
    assert opened.n_layers == 4
    hidden = worker.hidden(np.arange(5, dtype=np.int32), request_id="r", start=0, end=1, position=0)
    answer = worker.forward(
        hidden, request_id="r", start=1, end=4, position=0, want="token", n_prompt_tokens=5, sampling=GREEDY
    )
    assert isinstance(answer.message, ipc.Token)
    model = llama_cpp.Llama(str(original), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
    model.eval(list(range(5)))
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    expected = int(np.ctypeslib.as_array(pointer, (model.n_vocab(),)).argmax())
    model.close()
    assert answer.message.token == expected


@pytest.mark.usefixtures("segment_files")
def test_segment_files_of_parts_are_found_by_the_daemon_and_go_with_a_changed_part(
    make_model: MakeModel, tmp_path: Path
) -> None:
    parts = split_gguf(make_model("llama"), tmp_path, [9, 20])
    catalogue = Catalogue(tmp_path / "catalogue.db")
    entry = catalogue.add(parts[0])
    engine = open_engine(parts[0], tmp_path)
    engine.layers.load(1, 3)
    engine.close()
    (copy,) = segments_of(entry, tmp_path / "segments")
    assert (copy.name.start, copy.name.end) == (1, 3)
    parts[2].touch()
    assert segments_of(catalogue.resolve(entry.name), tmp_path / "segments") == []


def test_parts_that_do_not_belong_together_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    original = make_model("llama")
    parts = split_gguf(original, tmp_path, [9, 20])
    for change, complaint in (
        ({2: {"split.no": 2}}, "is not part 2 of 3"),
        ({3: {"split.count": 2}}, "is not part 3 of 3"),
        ({1: {"split.tensors.count": 5}}, "announces 5 tensors"),
    ):
        split_gguf(original, tmp_path, [9, 20], changed=change)
        with pytest.raises(CallError, match=complaint):
            open_source(parts[0])
    split_gguf(original, tmp_path, [9, 20], twice="output.weight")
    with pytest.raises(CallError, match=r"has tensor output\.weight again"):
        open_source(parts[0])
    with pytest.raises(CallError, match="is not the first"):
        open_source(parts[1])
    parts[1].unlink()
    with pytest.raises(CallError, match=r"cannot read .*00002-of-00003"):
        open_source(parts[0])
