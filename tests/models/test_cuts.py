"""What a self-check found goes into the manifest, and what others say only where nobody here knows better."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gguf_parts import LLAMA, gguf_bytes

from swarmllm.models import Catalogue, LayerRange, Manifest, build_manifest
from swarmllm.models.manifest import checked_unit, needs_check, with_reported_unit, with_verdict

TENSORS = {
    name: bytes(128)
    for name in ("token_embd.weight", "output.weight", *(f"blk.{layer}.attn_q.weight" for layer in range(2)))
}


def manifest_of(path: Path, architecture: str) -> Manifest:
    keys = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    path.write_bytes(gguf_bytes({**keys, "general.architecture": architecture}, TENSORS))
    return build_manifest(path)


@pytest.fixture
def unknown(tmp_path: Path) -> Manifest:
    return manifest_of(tmp_path / "unknown.gguf", "unheard-of")


def test_a_verdict_does_not_make_it_another_model(unknown: Manifest) -> None:
    assert (unknown.cut_alignment, needs_check(unknown, "engine 1")) == (0, True)
    passed = with_verdict(unknown, 1, "", "engine 1")
    assert (passed.model_id, passed.can_cut_at(1), checked_unit(passed)) == (unknown.model_id, True, 1)
    assert not needs_check(passed, "engine 1")
    assert needs_check(passed, "engine 2")
    failed = with_verdict(unknown, 0, "other numbers", "engine 1")
    assert (failed.can_cut_at(1), failed.whole_reason, checked_unit(failed)) == (False, "other numbers", 0)
    assert not needs_check(failed, "engine 1")


def test_what_another_node_found_counts_until_this_one_can_try(unknown: Manifest) -> None:
    told = with_reported_unit(unknown, 1)
    assert (told.model_id, told.cut_alignment, told.whole_reason) == (unknown.model_id, 1, "")
    assert needs_check(told, "engine 1")
    for nonsense in (0, 2, 65535):
        assert with_reported_unit(unknown, nonsense) == unknown


@pytest.fixture
def listed(tmp_path: Path) -> Manifest:
    """Of an architecture in the table, which allows cuts at each of its layers."""
    return manifest_of(tmp_path / "known.gguf", "llama")


def test_the_table_is_a_hint_until_the_file_was_tried(listed: Manifest) -> None:
    assert (listed.cut_alignment, checked_unit(listed), needs_check(listed, "engine 1")) == (1, 0, True)
    passed = with_verdict(listed, 1, "", "engine 1")
    assert (passed.can_cut_at(1), checked_unit(passed), needs_check(passed, "engine 1")) == (True, 1, False)
    failed = with_verdict(listed, 0, "other numbers", "engine 1")
    assert (failed.can_cut_at(1), failed.whole_reason) == (False, "other numbers")
    assert checked_unit(failed) == failed.n_layers
    assert not needs_check(failed, "engine 1")
    assert needs_check(failed, "engine 2")


def test_another_node_may_only_forbid_cuts_that_the_table_allows(tmp_path: Path, listed: Manifest) -> None:
    told = with_reported_unit(listed, listed.n_layers)
    assert (told.cut_alignment, bool(told.whole_reason)) == (0, True)
    assert needs_check(told, "engine 1")  # once the whole file is here
    assert checked_unit(told) == 0  # and it is not passed on
    assert with_reported_unit(listed, 0) == listed
    whole = manifest_of(tmp_path / "whole.gguf", "smollm3")
    assert whole.cut_alignment == 0
    assert with_reported_unit(whole, 1) == whole
    assert not needs_check(whole, "engine 1")
    larger = msgspec.structs.replace(listed, n_layers=12, cut_alignment=4)
    for unit, alignment in ((1, 4), (6, 4), (8, 8), (12, 0), (1024, 0)):
        assert with_reported_unit(larger, unit).cut_alignment == alignment


def test_a_verdict_is_kept_and_manifests_from_before_are_read(tmp_path: Path, unknown: Manifest) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    entry = catalogue.add(tmp_path / "unknown.gguf", "mine")
    catalogue.revise(entry.model_id, with_verdict(unknown, 1, "", "engine 1"))
    kept = Catalogue(tmp_path / "catalogue.sqlite").get("mine")
    assert kept.manifest.can_cut_at(1)
    assert kept.manifest.whole == LayerRange(0, 2)
    again = catalogue.add(tmp_path / "unknown.gguf", "mine")
    assert again.manifest == kept.manifest
    old = msgspec.to_builtins(unknown)
    del old["cuts_checked_with"]
    assert msgspec.convert(old, Manifest) == unknown
