"""A model in several files is the model that it would be in one, or is refused from its headers."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from gguf_parts import LLAMA, gguf_bytes, string, tensors, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from split_gguf import split_gguf

from swarmllm.errors import BadModel, ModelNotFound
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Catalogue, Store, build_manifest
from swarmllm.models.gguf_header import read_header
from swarmllm.models.hashing import hash_model
from swarmllm.models.model_files import first_file, open_model
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm_proto.segment_names import copy_name, copy_prefix
from swarmllm_proto.split_files import by_model, joint_mtime_ns, parse_split_name

GUIDE = build_manifest(GUIDE_PATH)
N_TENSORS = len(GUIDE.tensors)


@settings(max_examples=12)
@given(st.lists(st.integers(0, N_TENSORS), max_size=4).map(sorted))
def test_the_id_and_the_digests_are_those_of_one_file_wherever_it_is_split(
    tmp_path_factory: pytest.TempPathFactory, boundaries: list[int]
) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path_factory.mktemp("split"), boundaries)
    for named in {parts[0], parts[-1]}:
        split = build_manifest(named)
        assert split.canonical_bytes == GUIDE.canonical_bytes
        assert {each.name: each.blake3 for each in split.tensors} == {
            each.name: each.blake3 for each in GUIDE.tensors
        }


def test_the_joined_file_that_offsets_speak_of_is_the_model_in_one_file(tmp_path: Path) -> None:
    first, *_ = split_gguf(GUIDE_PATH, tmp_path, (0, 7, 31))
    hashed = hash_model(first)
    joined = bytearray(hashed.state.size_bytes)
    with open_model(first) as files:
        joined[: len(files.start)] = files.start
        for tensor in hashed.manifest.tensors:
            file, offset = files.place(tensor.name, tensor.offset)
            joined[tensor.offset : tensor.offset + tensor.size_bytes] = os.pread(
                file, tensor.size_bytes, offset
            )
    path = tmp_path / "joined.gguf"
    path.write_bytes(joined)
    assert build_manifest(path) == hashed.manifest
    with path.open("rb") as file:
        assert "split.count" not in read_header(file).keys


def test_any_part_and_the_folder_lead_to_the_first_part(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    (tmp_path / "README.md").write_bytes(b"")
    assert {first_file(each) for each in (*parts, tmp_path)} == {parts[0]}


def test_a_folder_of_several_models_is_refused_with_their_names(tmp_path: Path) -> None:
    split_gguf(GUIDE_PATH, tmp_path, (20,), stem="a")
    split_gguf(GUIDE_PATH, tmp_path, (20,), stem="b")
    with pytest.raises(
        BadModel, match=r"2 models; name one of them: a-00001-of-00002.gguf, b-00001-of-00002"
    ):
        first_file(tmp_path)
    with pytest.raises(BadModel, match="no GGUF file"):
        first_file(Path(__file__).parent)


def test_a_missing_part_is_named_before_anything_is_read(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))
    parts[1].unlink()
    parts[0].write_bytes(b"no GGUF at all")
    for call in (lambda: build_manifest(parts[2]), lambda: first_file(parts[0])):
        with pytest.raises(
            BadModel, match=r"part 2 of 3 is missing: there is no .*model-00002-of-00003.gguf"
        ):
            call()


REFUSED = {
    "another number of parts": ({2: {"split.count": 4}}, r"part 2 of 3 .*split.count is 4, its name says 3"),
    "no number of parts": ({2: {"split.count": None}}, r"part 2 of 3 .*split.count is missing"),
    "another part": ({3: {"split.no": 1}}, r"part 3 of 3 .*split.no is 1, its name says 2"),
    "a negative number of tensors": ({1: {"split.tensors.count": -1}}, r"part 1 of 3 .*split.tensors.count"),
    "a tensor is missing": (
        {each: {"split.tensors.count": N_TENSORS + 1} for each in (1, 2, 3)},
        rf"part 1 of 3 .*split.tensors.count is {N_TENSORS + 1}, the parts have {N_TENSORS} tensors",
    ),
    "a part of a larger model": (
        {3: {"split.tensors.count": 999}},
        r"part 3 of 3 .*split.tensors.count is 999",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_do_not_belong_together_are_refused_with_part_and_field(tmp_path: Path, case: str) -> None:
    changed, complaint = REFUSED[case]
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40), changed=changed)
    with pytest.raises(BadModel, match=complaint):
        build_manifest(parts[0], _never)


def _never(done: int, total: int) -> None:
    raise AssertionError("a tensor was read")


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40), twice="blk.0.attn_q.weight")
    with pytest.raises(BadModel, match=r"part 3 of 3 .*tensor blk.0.attn_q.weight is in part 1 already"):
        build_manifest(parts[0], _never)


def test_a_part_that_is_no_gguf_or_too_short_is_named(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))
    whole = parts[1].read_bytes()
    parts[1].write_bytes(b"<html>not found</html>")
    with pytest.raises(BadModel, match=r"part 2 of 3 \(model-00002-of-00003.gguf\): not a GGUF file"):
        build_manifest(parts[0], _never)
    parts[1].write_bytes(whole[:-100])
    with pytest.raises(BadModel, match=r"part 2 of 3 .*truncated: tensor"):
        build_manifest(parts[0], _never)


def write_parts(folder: Path, *parts: bytes) -> Path:
    paths = [folder / f"m-{number:05}-of-{len(parts):05}.gguf" for number in range(1, len(parts) + 1)]
    for path, data in zip(paths, parts, strict=True):
        path.write_bytes(data)
    return paths[0]


def small_part(number: int, names: list[str], **more: object) -> bytes:
    data = tensors()
    keys = {**(LLAMA if number == 0 else {}), "split.no": number, "split.count": 2}
    inside = {name: data[name] for name in names}
    return gguf_bytes({**keys, "split.tensors.count": len(data), **more}, inside)


NAMES = list(tensors())


def test_metadata_that_contradicts_the_first_part_is_refused_and_a_copy_of_it_is_not(tmp_path: Path) -> None:
    copied = write_parts(tmp_path, small_part(0, NAMES[:3]), small_part(1, NAMES[3:], **LLAMA))
    assert build_manifest(copied).model_id == build_manifest(write_gguf(tmp_path / "one.gguf")).model_id
    for key, value in (("general.architecture", "qwen2"), ("llama.block_count", 3), ("other", 1)):
        other = small_part(1, NAMES[3:], **{key: value})
        first = write_parts(tmp_path, small_part(0, NAMES[:3]), other)
        with pytest.raises(BadModel, match=rf"part 2 of 2 .*key {key} .* a part of another model"):
            build_manifest(first, _never)


def test_layers_of_another_width_are_parts_of_another_model(tmp_path: Path) -> None:
    def norm(width: int, layer: int) -> bytes:
        return gguf_bytes(
            {**(LLAMA if layer == 0 else {}), "split.no": layer, "split.count": 2, "split.tensors.count": 2},
            {f"blk.{layer}.attn_norm.weight": bytes(4 * width)},
        )

    with pytest.raises(BadModel, match=r"part 2 of 2 .*shape \(16,\), that of another layer \(8,\)"):
        build_manifest(write_parts(tmp_path, norm(8, 0), norm(16, 1)), _never)


def test_unknown_types_are_refused_with_part_and_tensor(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    unknown = head + string("blk.1.x") + struct.pack("<IQIQ", 1, 8, 999, 0) + bytes(64)
    with pytest.raises(BadModel, match=r"part 2 of 2 .*blk.1.x has the unknown ggml type 999"):
        build_manifest(write_parts(tmp_path, small_part(0, NAMES[:3]), unknown), _never)


def test_each_part_is_aligned_as_it_says(tmp_path: Path) -> None:
    one = build_manifest(write_gguf(tmp_path / "one.gguf"))
    data = tensors()
    keys = {
        **LLAMA,
        "general.alignment": 64,
        "split.no": 0,
        "split.count": 2,
        "split.tensors.count": len(data),
    }
    first = gguf_bytes(keys, {name: data[name] for name in NAMES[:3]}, alignment=64)
    split = build_manifest(write_parts(tmp_path, first, small_part(1, NAMES[3:])))
    assert split.model_id == one.model_id
    assert not any(tensor.offset % 64 for tensor in split.tensors)


def test_more_parts_than_anybody_makes_are_refused_by_the_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    path.touch()
    with pytest.raises(BadModel, match="99999 parts; at most 1024"):
        build_manifest(path)


def test_a_later_part_may_not_have_a_header_of_hundreds_of_megabytes(tmp_path: Path) -> None:
    filler = b"".join(
        string(f"k{number}") + struct.pack("<I", 8) + string("x" * 2**20) for number in range(17)
    )
    huge = b"GGUF" + struct.pack("<IQQ", 3, 0, 17) + filler
    with pytest.raises(BadModel, match=r"part 2 of 2 .*header is longer than 16777216 bytes"):
        build_manifest(write_parts(tmp_path, small_part(0, NAMES), huge), _never)


def test_parts_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))

    def touch(done: int, total: int) -> None:
        os.utime(parts[2], ns=(1, 1))

    with pytest.raises(BadModel, match="was changed while it was read"):
        build_manifest(parts[0], touch)


# The catalogue.


def open_catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "catalogue.db")


def test_a_split_model_is_added_once_and_found_again(tmp_path: Path) -> None:
    catalogue = open_catalogue(tmp_path)
    parts = split_gguf(GUIDE_PATH, tmp_path, (0, 20), stem="Guide-Q8_0")
    entry = catalogue.add(parts[1], "split")
    assert (entry.model_id, entry.path) == (GUIDE.model_id, parts[0])
    assert [each.path for each in entry.parts] == [str(each) for each in parts]
    assert catalogue.get("split") == catalogue.resolve("split") == entry
    assert catalogue.add(tmp_path, None, _never).parts == entry.parts, "hashed twice"
    assert catalogue.add(GUIDE_PATH, "one-file").model_id == entry.model_id
    catalogue.remove("split")
    assert all(each.exists() for each in parts)
    parts[2].unlink()
    with pytest.raises(BadModel, match="part 3 of 3 is missing"):
        catalogue.add(parts[0], "split")


def test_a_part_that_changed_or_went_is_noticed_and_one_that_was_touched_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of them, not some that chance picks.
    monkeypatch.setattr("swarmllm.models.verification.N_CHUNKS", 10**6)
    catalogue = open_catalogue(tmp_path)
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))
    before = catalogue.add(parts[0], "split")
    os.utime(parts[1], ns=(10**18, 10**18))
    after = catalogue.resolve("split")
    assert after.state != before.state
    assert catalogue.get("split") == after
    assert after.trouble() == ""
    data = bytearray(parts[1].read_bytes())
    data[-200] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(BadModel, match="has changed since it was added"):
        catalogue.resolve("split")
    parts[1].write_bytes(data[:-32])
    assert "has changed since it was added" in catalogue.get("split").trouble()
    parts[1].unlink()
    assert str(parts[1]) in catalogue.get("split").trouble()


def test_the_places_of_a_split_model_give_the_bytes_of_the_joined_file(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, (1, 20))
    entry = open_catalogue(tmp_path).add(parts[0], "split")
    places, original = TensorLocations(entry, only_unchanged=True), GUIDE_PATH.read_bytes()
    by_name = {tensor.name: tensor for tensor in GUIDE.tensors}
    for tensor in entry.manifest.tensors:
        at = by_name[tensor.name].offset
        assert places.read(tensor, 8, 16) == original[at + 8 : at + 24]
    header_bytes = min(tensor.offset for tensor in entry.manifest.tensors)
    assert places.read_container(0, 4) == b"GGUF"
    assert len(places.read_container(0, header_bytes)) == header_bytes
    os.utime(parts[2], ns=(1, 1))
    with pytest.raises(BadModel, match="has changed"):
        places.read_container(0, 4)


def test_damage_in_a_part_is_found_by_name(tmp_path: Path) -> None:
    catalogue = open_catalogue(tmp_path)
    parts = split_gguf(GUIDE_PATH, tmp_path, (20, 40))
    entry = catalogue.add(parts[0], "split")
    store = Store(catalogue, tmp_path / "store")
    assert store.verify(entry, lambda done, total: None) == ()
    data = bytearray(parts[2].read_bytes())
    data[-200] ^= 1
    parts[2].write_bytes(data)
    (damaged,) = store.verify(entry, lambda done, total: None)
    assert parts[2].name[-20:-5] == "-00003-of-00003"
    assert damaged in entry.parts[2].offsets


@pytest.mark.parametrize(
    ("name", "number", "count"),
    [("a-00001-of-00004.gguf", 1, 4), ("a-b-00003-of-00003.gguf", 3, 3), ("x/y-00002-of-00002.gguf", 2, 2)],
)
def test_names_of_parts_are_read_and_written(name: str, number: int, count: int) -> None:
    split = parse_split_name(name)
    assert split is not None
    assert (split.number, split.count, str(split)) == (number, count, name)
    assert [each.number for each in split.all()] == list(range(1, count + 1))


@pytest.mark.parametrize(
    "name",
    ["a.gguf", "a-00001-of-00001.gguf", "a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-1-of-2.gguf"],
)
def test_other_names_are_not_those_of_parts(name: str) -> None:
    assert parse_split_name(name) is None


def test_files_are_grouped_by_model() -> None:
    names = ["b-00002-of-00002.gguf", "a.gguf", "b-00001-of-00002.gguf"]
    assert by_model(names) == {"a.gguf": ["a.gguf"], "b-00001-of-00002.gguf": [names[2], names[0]]}


def test_a_change_of_any_file_changes_the_joint_time() -> None:
    files = [(5, 10), (5, 20)]
    assert joint_mtime_ns(files) != joint_mtime_ns(files[::-1])
    assert 0 <= joint_mtime_ns(files) < 2**63


def test_removing_a_split_model_leaves_the_users_files_and_takes_the_copies(tmp_path: Path) -> None:
    parts = split_gguf(GUIDE_PATH, tmp_path, [30, 60])
    store = Store(Catalogue(tmp_path / "catalogue.db"), tmp_path / "models", copies=tmp_path / "copies")
    entry = store.catalogue.add(parts[0])
    (tmp_path / "copies").mkdir()
    states = [(part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    prefix = copy_prefix(str(parts[0].resolve()), sum(size for size, _ in states), joint_mtime_ns(states))
    copy, other = (tmp_path / "copies" / copy_name(each, 4, 8) for each in (prefix, "0" * len(prefix)))
    for file in (copy, other):
        file.write_bytes(GUIDE_PATH.read_bytes())
    store.remove(entry)
    assert not copy.exists()
    assert other.exists()
    assert all(part.exists() for part in parts)
    with pytest.raises(ModelNotFound):
        store.catalogue.resolve(entry.name)
