"""A projector whose header names another model than the model's own is told apart from one that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter

from swarmllm.models.projector_names import other_model_named


def write(path: Path, **names: object) -> Path:
    writer = GGUFWriter(path, "clip", use_temp_file=False)
    for key, value in names.items():
        name = "general.base_model.0.repo_url" if key == "base" else "general.name"
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("model", "projector", "said"),
    [
        ({"name": "Llava 1.6 7B"}, {"name": "Janus Pro 7B"}, "'Janus Pro 7B', of the model 'Llava 1.6 7B'"),
        ({"name": "Llava 1.6 7B"}, {"name": "llava-1.6-7b"}, ""),
        ({"name": "Mine", "base": "https://hub/a/b"}, {"name": "b", "base": "https://hub/a/b"}, ""),
        ({"name": "b", "base": "https://hub/a/b"}, {"name": "b", "base": "https://hub/c/d"}, "repo_url"),
        ({"name": "Llava"}, {}, ""),
        ({"name": "Llava"}, {"name": 7}, ""),
        ({"name": "Llava"}, {"name": ""}, ""),
    ],
)
def test_names_of_different_models_are_told(
    tmp_path: Path, model: dict[str, object], projector: dict[str, object], said: str
) -> None:
    found = other_model_named(write(tmp_path / "m.gguf", **model), write(tmp_path / "p.gguf", **projector))
    assert said in found if said else found == ""


def test_files_that_cannot_be_read_are_not_told_apart(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", name="Llava")
    (tmp_path / "p.gguf").write_bytes(b"GGUF")
    assert other_model_named(whole, tmp_path / "p.gguf") == ""
    assert other_model_named(whole, tmp_path / "none.gguf") == ""
