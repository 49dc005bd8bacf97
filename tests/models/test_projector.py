"""Projectors are read as strangers' files, are attached to models, and are no part of a model's id."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf_parts import write_gguf
from vision_models import N_DEEPSTACK, projector, text_model

from swarmllm.errors import BadModel
from swarmllm.models import Catalogue
from swarmllm.models.projector import found_beside, read_projector

MANY = 4


def write(
    path: Path, *, n_embd: int = MANY, family: str = "mlp", tensor: str = "mm.2.weight", **keys: object
) -> Path:
    writer = GGUFWriter(path, str(keys.pop("architecture", "clip")), use_temp_file=False)
    if keys.pop("has_vision", True):
        writer.add_bool("clip.has_vision_encoder", True)
    if family:
        writer.add_string("clip.projector_type", family)
    if keys.pop("tiles", False):
        writer.add_array("clip.vision.image_grid_pinpoints", [336, 672])
    writer.add_tensor(tensor, np.zeros((n_embd, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_its_header_tells_family_and_width(tmp_path: Path) -> None:
    path = write(tmp_path / "mm.gguf", n_embd=24)
    done: list[tuple[int, int]] = []
    read = read_projector(path, lambda *progress: done.append(progress))
    assert (read.family, read.n_embd, read.size_bytes) == ("mlp", 24, path.stat().st_size)
    assert done == [(read.size_bytes, read.size_bytes)]
    assert read.blake3 == read_projector(path).blake3
    assert read.blake3 != read_projector(write(tmp_path / "other.gguf", n_embd=25)).blake3


def test_further_parts_of_its_rows_count_towards_their_width(tmp_path: Path) -> None:
    path = projector(tmp_path / "deep.gguf", "qwen3vl_merger", 64)
    assert read_projector(path).n_embd == 64 * (1 + N_DEEPSTACK)
    manifest = Catalogue(tmp_path / "models.sqlite").add(text_model(tmp_path, "qwen3vl"), "deep").manifest
    assert (manifest.n_embd, manifest.n_embd_input) == (64, 64 * (1 + N_DEEPSTACK))
    assert manifest.cut_alignment == 1 + N_DEEPSTACK, "the first segment takes all parts"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"family": "gemma4uv"}, "'gemma4uv' are not supported: its rows see later ones"),
        ({"family": "glm4v"}, "several positions each"),
        ({"family": "granite4_vision"}, "deepstack"),
        ({"family": "yasa2"}, "nobody has compared it with libmtmd"),
        ({"family": "resampler"}, "MiniCPM-V before 2.6"),
        ({"family": ""}, "clip.projector_type is missing"),
        ({"architecture": "llama"}, "a model of architecture 'llama', not a projector"),
        ({"has_vision": False}, "encodes neither pictures nor sounds"),
        ({"tensor": "mm.0.weight"}, "tensor mm.2.weight is missing"),
        ({"family": "pixtral", "tiles": True}, "that cut pictures into tiles are not supported"),
    ],
)
def test_what_no_pipeline_can_use_is_refused_by_name(
    tmp_path: Path, written: dict[str, object], reason: str
) -> None:
    with pytest.raises(BadModel, match=reason) as caught:
        read_projector(write(tmp_path / "mm.gguf", **written))
    assert caught.value.field == "mmproj"
    assert "mm.gguf" in caught.value.message


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "mm.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in range(0, len(whole), 7):
        broken.write_bytes(whole[:length])
        with pytest.raises(BadModel):
            read_projector(broken)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none.gguf", tmp_path / "pipe"):
        with pytest.raises(BadModel) as caught:
            read_projector(path)
        assert caught.value.field == "mmproj"


@pytest.mark.parametrize(
    ("model", "beside", "found"),
    [
        ("SmolVLM-Instruct-Q4_K_M.gguf", ["mmproj-SmolVLM-Instruct-f16.gguf"], 0),
        ("llava-7b-00001-of-00002.gguf", ["llava-7b-mmproj.gguf"], 0),
        ("a.gguf", ["mmproj-b.gguf", "a-draft.gguf"], None),
        ("a.gguf", ["mmproj-a-f16.gguf", "mmproj-a-q8_0.gguf"], None),
        ("a.gguf", [], None),
    ],
)
def test_it_is_found_by_the_models_name(
    tmp_path: Path, model: str, beside: list[str], found: int | None
) -> None:
    for name in (model, *beside):
        (tmp_path / name).write_bytes(b"")
    assert found_beside(tmp_path / model) == (None if found is None else tmp_path / beside[found])


def test_a_model_keeps_its_projector_and_its_id(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    path = write_gguf(tmp_path / "a.gguf")
    entry = catalogue.add(path)
    assert entry.projector is None
    read = read_projector(write(tmp_path / "mm.gguf", n_embd=entry.manifest.n_embd))
    attached = catalogue.attach(entry.model_id, read)
    assert attached.projector == read
    assert attached.model_id == entry.model_id
    again = Catalogue(tmp_path / "catalogue.sqlite")
    assert again.get(entry.name).projector == again.list()[0].projector == read
    assert again.add(path).projector == again.add(path, "other").projector == read
    wrong = read_projector(write(tmp_path / "wrong.gguf", n_embd=entry.manifest.n_embd + 1))
    with pytest.raises(
        BadModel, match=rf"rows of {wrong.n_embd} numbers, the model's have {entry.manifest.n_embd}"
    ):
        catalogue.attach(entry.model_id, wrong)
    assert again.get(entry.name).projector == read
    catalogue.remove(entry.model_id)
    assert catalogue.add(path).projector is None
