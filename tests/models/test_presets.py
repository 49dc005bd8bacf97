"""Presets as TOML, in the database, and from Ollama's Modelfiles."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from gguf_parts import write_gguf
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.ollama.models import modelfile
from swarmllm.api.openai.schema import SAMPLING_NAMES
from swarmllm.errors import Conflict, InvalidRequest, ModelNotFound
from swarmllm.guide import GUIDE_PATH, GUIDE_TEMPERATURE, GUIDE_TYPICAL_P
from swarmllm.models import Catalogue, build_manifest
from swarmllm.models.entry import n_parameters, parameter_size, quantisation
from swarmllm.models.modelfile import parse_modelfile
from swarmllm.models.presets import (
    NO_PRESET,
    Preset,
    Presets,
    SamplingDefaults,
    read_toml,
    write_toml,
)
from swarmllm.node.data_dir import open_catalogue

SHARES = st.none() | st.floats(0, 1)
SAMPLING = st.builds(
    SamplingDefaults,
    temperature=st.none() | st.floats(0, 2),
    top_p=SHARES,
    top_k=st.none() | st.integers(0, 2**20),
    seed=st.none() | st.integers(0, 2**32 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=20), max_size=4),
)
PRESETS = st.builds(
    Preset, system=st.text(max_size=60), context=st.none() | st.integers(16, 2**24), sampling=SAMPLING
)


@given(PRESETS)
def test_what_is_written_is_read(preset: Preset) -> None:
    assert read_toml(write_toml(preset)) == preset


def test_a_preset_says_what_requests_can_say() -> None:
    assert {field.name for field in msgspec.structs.fields(SamplingDefaults)} <= set(SAMPLING_NAMES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("temperature = 1", "temperature"),
        ("[sampling]\ntemperature = 3", r"\$\.sampling\.temperature"),
        ("context = 'much'", r"\$\.context"),
        ("[sampling]\nstop = [''" + "]", "stop"),
        ("= 3", "no preset"),
        ("system = '" + "x" * 300_000 + "'", "at most"),
    ],
)
def test_a_wrong_preset_is_refused_with_its_key(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        read_toml(text)


def test_presets_belong_to_names_and_go_with_them(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.db")
    entry = catalogue.add(write_gguf(tmp_path / "tiny.gguf"), "tiny")
    presets = Presets(catalogue)
    assert catalogue.alias("tiny", "terse").further_names == ("terse",)
    terse = Preset(system="Be brief.", sampling=SamplingDefaults(stop=["#"]))
    presets.put("terse", terse)
    assert presets.all() == {"terse": terse}
    presets.put("terse", NO_PRESET)
    assert presets.all() == {}
    for name in (entry.model_id, "nobody"):
        with pytest.raises(ModelNotFound):
            presets.put(name, terse)


def test_an_alias_is_a_free_name_and_leads_to_one_model(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.db")
    catalogue.add(write_gguf(tmp_path / "tiny.gguf"), "tiny")
    catalogue.add(GUIDE_PATH, "guide")
    assert catalogue.alias("tiny", "small").name == "tiny"
    assert catalogue.alias("tiny", "small").further_names == ("small",)
    assert catalogue.alias("tiny", "tiny").further_names == ("small",)
    for taken in ("guide", "small"):
        other = "tiny" if taken == "guide" else "guide"
        with pytest.raises(Conflict, match=f"the name {taken} already belongs"):
            catalogue.alias(other, taken)
    with pytest.raises(InvalidRequest):
        catalogue.alias("tiny", "No Name")
    assert catalogue.get("small").name == "tiny"


MODELFILE = '''
# A comment.
FROM guide:latest
SYSTEM """You are Mario,
and nobody else."""
PARAMETER temperature 0.7
parameter num_ctx 4096
PARAMETER num_predict -1
PARAMETER seed -1
PARAMETER stop "<|user|>"
PARAMETER stop AI:
PARAMETER num_gpu 99
LICENSE "MIT"
'''


def test_a_modelfile_becomes_a_preset() -> None:
    read = parse_modelfile(MODELFILE)
    assert read.source == "guide:latest"
    assert read.preset == Preset(
        system="You are Mario,\nand nobody else.",
        context=4096,
        sampling=SamplingDefaults(temperature=0.7, stop=["<|user|>", "AI:"]),
    )
    assert read.left_out == ("PARAMETER num_gpu", "LICENSE")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no FROM"),
        ("FROM a\nFROM b", "line 2: FROM appears twice"),
        (
            "FROM a\nTEMPLATE {{ .Tools }}",
            r"line 2: TEMPLATE: .*Tools.* is not translated.*--own-template",
        ),
        ("FROM a\nADAPTER ./x", "line 2: ADAPTER is not supported"),
        ("FROM a\nMESSAGE user hello", "line 2: MESSAGE is not supported"),
        ("FROM a\nPARAMETER temperature hot", "line 2: PARAMETER temperature: 'hot' is no number"),
        ("FROM a\nPARAMETER temperature 9", "PARAMETER temperature: Expected `float` <= 2"),
        ("FROM a\nPARAMETER num_ctx 99999999", "PARAMETER num_ctx: Expected `int` <= 16777216"),
        ("FROM a\nPARAMETER tfs_z 0.5", "tfs_z is not supported"),
        ("FROM a\nPARAMETER colour red", "colour is no parameter"),
        ("FROM a\nSING a song", "line 2: SING is no instruction"),
        ("FROM a\nSYSTEM", "line 2: 'SYSTEM' is no instruction with a value"),
        ('FROM a\nSYSTEM """never\nclosed', "line 2: the three quotes are never closed"),
        ('FROM a\nSYSTEM """x""" y', "something after the three quotes"),
        ("x" * 300_000, "at most"),
    ],
)
def test_what_a_modelfile_cannot_mean_here_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        parse_modelfile(text)


def test_a_template_that_can_be_translated_is(tmp_path: Path) -> None:
    read = parse_modelfile('FROM a\nTEMPLATE """{{ .Prompt }}\n"""')
    assert "prompt" in read.preset.template
    assert read_toml(write_toml(read.preset)) == read.preset


def test_the_template_is_left_out_where_the_model_has_its_own() -> None:
    read = parse_modelfile('FROM a\nTEMPLATE """{{ .Prompt }}\n"""', own_template=True)
    assert read.left_out == ("TEMPLATE (the model's own chat template is used)",)


@given(st.text(alphabet='FROM SYSTEM"\n#abc PARAMETER0.', max_size=80))
def test_any_text_is_a_modelfile_or_refused(text: str) -> None:
    with suppress(InvalidRequest):
        assert parse_modelfile(text).source


def test_sizes_are_told_as_people_say_them() -> None:
    guide = build_manifest(GUIDE_PATH)
    assert quantisation(guide) == "Q8_0"
    assert n_parameters(guide) > 8e6
    assert parameter_size(guide) == f"{n_parameters(guide) / 1e6:.0f}M"

    def mixed(*types: tuple[str, int]) -> str:
        (layer,) = [shard for shard in guide.shards if shard.index == 0]
        matrix = next(tensor for tensor in layer.tensors if len(tensor.shape) > 1)
        tensors = tuple(msgspec.structs.replace(matrix, name=name, ggml_type=kind) for name, kind in types)
        shard = msgspec.structs.replace(layer, tensors=tensors)
        return quantisation(msgspec.structs.replace(guide, shards=(shard,)))

    q4_k, q6_k = 12, 14
    assert mixed(("blk.0.a", q4_k), ("blk.0.b", q4_k), ("blk.0.c", q6_k)) == "Q4_K_M"
    assert mixed(("blk.0.a", q4_k), ("blk.0.b", q4_k), ("output.weight", q6_k)) == "Q4_K_S"
    assert mixed(("blk.0.a", q6_k)) == "Q6_K"


def test_the_guide_comes_with_a_preset_that_is_the_users_from_then_on(tmp_path: Path) -> None:
    presets = Presets(open_catalogue(tmp_path))
    sampling = SamplingDefaults(temperature=GUIDE_TEMPERATURE, typical_p=GUIDE_TYPICAL_P)
    assert presets.all() == {"guide": Preset(sampling=sampling)}
    presets.put("guide", NO_PRESET)
    assert Presets(open_catalogue(tmp_path)).all() == {}
    own = Preset(system="Be brief.")
    presets.put("guide", own)
    assert Presets(open_catalogue(tmp_path)).all() == {"guide": own}


def test_a_preset_becomes_a_modelfile_that_gives_it_back() -> None:
    preset = Preset(
        system='You are a pirate.\nSay "arr".',
        context=1024,
        max_tokens=9,
        sampling=SamplingDefaults(temperature=0.5, top_k=7, stop=["###", "a b"]),
    )
    read = parse_modelfile(modelfile("guide", preset))
    assert (read.source, read.preset, read.left_out) == ("guide", preset, ())
    unsaid = msgspec.structs.replace(preset, system='"""', template="{{ messages }}")
    read = parse_modelfile(modelfile("guide", unsaid))
    assert read.preset == msgspec.structs.replace(preset, system="")
