"""Where a file may be cut is tried: what the table allows, and for architectures that it does not have, all
that is likely. Nowhere else is a model cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarmllm.models.hashing import build_manifest
from swarmllm_proto import architectures, ipc
from swarmllm_proto.architectures import ARCHITECTURES, Architecture, cut_rule, generic, units_to_try
from swarmllm_workers.engine import cut_check, releases
from swarmllm_workers.engine.cut_check import CutVerdict, check_cuts
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment_file import plan_values
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

from .blueprint import Family, write
from .conftest import StartWorker
from .factory import Spec, build
from .families import FAMILIES
from .family_pieces import BASE, NO_BIAS
from .generic_families import CUT_EXACTLY, RUN_WHOLE
from .test_exactness import N_CTX, chain_logits, cuts, tokens_for, uncut_logits

pytestmark = pytest.mark.long

SETTINGS = EngineSettings(n_ctx=N_CTX, n_slots=2, n_threads=1)
CHUNKING = [1, 7, 32]
ALL = {**CUT_EXACTLY, **RUN_WHOLE}


def family(name: str) -> Family:
    return ALL[name][0]


def ignore(done_bytes: int, total_bytes: int) -> None:
    pass


def test_none_of_them_is_in_the_table() -> None:
    assert not {each.architecture for each, _ in ALL.values()} & set(ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT_EXACTLY)
def test_parts_that_pass_give_the_uncut_models_logits_under_every_cut(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", family(name))
    expected_unit = CUT_EXACTLY[name][1]
    progress: list[tuple[int, int]] = []
    verdict = check_cuts(path, tmp_path, SETTINGS, lambda done, total: progress.append((done, total)))
    assert (verdict.unit, verdict.reason) == (expected_unit, "")
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert 0 < progress[-1][0] <= progress[-1][1]
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]  # nothing of it is left on the disk

    engine = Engine(path, tmp_path / "segments", replace(SETTINGS, checked_unit=verdict.unit))
    tokens = tokens_for(engine.n_vocab)
    expected = uncut_logits(path, tokens, CHUNKING)
    assert expected.std() > 0.05
    for bounds in ([0, engine.n_layers], *cuts(engine.n_layers, verdict.unit)):
        engine.layers.load(0, engine.n_layers)
        np.testing.assert_array_equal(chain_logits(engine, bounds, tokens, CHUNKING), expected)
        if len(bounds) > 2:
            assert {segment.end - segment.start for segment in engine.layers.segments} == {verdict.unit}
        engine.layers.unload(0, engine.n_layers)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN_WHOLE)
def test_parts_that_fail_are_never_run(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", family(name))
    verdict = check_cuts(path, tmp_path, SETTINGS, ignore)
    assert verdict.unit == 0
    assert RUN_WHOLE[name][1] in verdict.reason
    engine = Engine(path, tmp_path / "segments", replace(SETTINGS, checked_unit=verdict.unit))
    with pytest.raises(CallError, match="has not been verified") as caught:
        engine.layers.load(0, 4)
    assert caught.value.kind == "cannot_cut"
    engine.layers.load(0, 8)  # whole it runs, and computes what libllama does
    tokens = tokens_for(engine.n_vocab)
    got = chain_logits(engine, [0, 8], tokens, CHUNKING)
    np.testing.assert_array_equal(got, uncut_logits(path, tokens, CHUNKING))
    engine.close()


@pytest.fixture
def table_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Architecture | None, str], None]:
    """Put a row into the table, or take one out of it; the rest stays as it is."""

    def change(row: Architecture | None, name: str) -> None:
        changed = {**ARCHITECTURES}
        changed.pop(name)
        if row is not None:
            changed[name] = row
        for module in (architectures, cut_check):
            monkeypatch.setattr(module, "ARCHITECTURES", changed)

    return change


@pytest.mark.slow
def test_a_cut_that_only_a_long_prompt_would_show_is_found_by_shortening_the_window(
    tmp_path: Path, table_says: Callable[[Architecture | None, str], None]
) -> None:
    """Every second layer of gpt-oss attends to a window, which only its number says; taken for unknown,
    with a window longer than any prompt that a check would run."""
    table_says(None, "gpt-oss")
    known = FAMILIES["gpt-oss"]
    keys = {**known.keys, "attention.sliding_window": 1024}
    path = write(tmp_path / "model.gguf", replace(known, keys=keys, n_layers=8))
    assert check_cuts(path, tmp_path, SETTINGS, ignore).unit == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("llama-3.2, tied", 1),
        ("gemma-2", 1),
        ("gemma-3", 1),
        ("glm-4", 1),
        ("command-r7b", 2),
        ("command-r7b, other period", 3),
        ("command-r7b, listed", 3),
        ("lfm2, heads listed", 3),
        ("ernie-4.5 moe, every second layer", 2),
        ("qwen3.5", 4),
    ],
)
def test_cuts_that_the_table_allows_are_tried_and_hold(name: str, unit: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", FAMILIES[name])
    progress: list[tuple[int, int]] = []
    verdict = check_cuts(path, tmp_path, SETTINGS, lambda done, total: progress.append((done, total)))
    assert verdict == CutVerdict(unit)
    # Something was run, unless this release of libllama would read the whole file otherwise.
    overlooked = "listed" in name and not releases.reads_window_lists(FAMILIES[name].architecture)
    assert (len(progress) > 2) != (overlooked and "command" in name)
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row", "unit"),
    [
        ("command-r7b, other period", Architecture("cohere2", sliding_window_period=4), 3),
        ("gemma", Architecture("gemma"), 0),  # a scaled input is scaled again in every part
        ("smollm3", Architecture("smollm3", cut_alignment=2), 4),
    ],
)
def test_where_the_table_is_wrong_coarser_cuts_are_allowed_or_none(
    name: str, row: Architecture, unit: int, tmp_path: Path, table_says: Callable[..., None]
) -> None:
    table_says(row, row.name)
    path = write(tmp_path / "model.gguf", FAMILIES[name])
    source = GgufFile(path)
    n_layers = FAMILIES[name].n_layers
    rule = cut_rule(row.name, n_layers, source.number, source.numbers)
    assert 0 < rule.cut_alignment < (unit or n_layers)
    verdict = check_cuts(path, tmp_path, SETTINGS, ignore)
    assert verdict.unit == unit
    assert bool(verdict.reason) == (unit == 0)


def test_parts_of_several_units_are_tried_too(tmp_path: Path, table_says: Callable[..., None]) -> None:
    """A row that cannot run parts of two layers: each layer alone is exact, and so are three."""
    made = FAMILIES["llama-3.1"]
    path = write(tmp_path / "model.gguf", replace(made, n_layers=6))
    failing: list[int] = []
    check = cut_check._Check(path, tmp_path, SETTINGS, ignore)
    through = check._through

    def wrong_in_twos(start: int, end: int, data: Sequence[np.ndarray]) -> list[np.ndarray]:
        failing.append(end - start)
        return [rows + (end - start == 2) for rows in through(start, end, data)]

    check._through = wrong_in_twos  # type: ignore[method-assign]
    assert check.run(()) == CutVerdict(3)
    assert set(failing) == {1, 2, 3}


def test_the_table_holds_where_a_few_tokens_show_nothing(tmp_path: Path) -> None:
    path = build(tmp_path / "model.gguf", Spec("llama", n_layers=3))
    check = cut_check._Check(path, tmp_path, SETTINGS, ignore)
    assert check._undecided("nothing") == CutVerdict(1)


def test_the_verdict_narrows_what_the_table_allows_and_no_more(tmp_path: Path) -> None:
    path = build(tmp_path / "model.gguf", Spec("smollm3", n_layers=16))
    for checked, alignment in ((0, 4), (1, 4), (6, 4), (8, 8), (16, 0), (1024, 0)):
        engine = Engine(path, tmp_path / "segments", replace(SETTINGS, checked_unit=checked))
        assert engine.rule.cut_alignment == alignment
        assert bool(engine.rule.whole_reason) == (alignment == 0)
        engine.close()


def test_lists_of_unknown_meaning_follow_the_layers_of_an_unknown_architecture(tmp_path: Path) -> None:
    lists = {"of_layers": [11, 12, 13, 14], "of_five": [1, 2, 3, 4, 5]}
    for name, expected in (("bitnet", [13, 14]), ("llama", [11, 12, 13, 14])):
        made = Family(name, {**BASE, **lists}, absent=(NO_BIAS,), n_layers=4)
        source = GgufFile(write(tmp_path / f"{name}.gguf", made))
        values = plan_values(source, ARCHITECTURES.get(name) or generic(name), 2, 4, 32)
        assert values[f"{name}.of_layers"].numbers().tolist() == expected
        assert values[f"{name}.of_five"].numbers().tolist() == [1, 2, 3, 4, 5]


def test_units_are_few_and_of_every_period() -> None:
    assert units_to_try(1) == ()
    assert units_to_try(2) == (1,)
    assert units_to_try(8) == (1, 4, 6)
    assert units_to_try(32) == (4, 6)
    assert units_to_try(61) == (8, 12)
    assert units_to_try(8, 1) == (1, 2, 3, 4, 6)
    assert units_to_try(24, 4) == (4, 8, 12, 16)
    assert units_to_try(4, 4) == ()
    for n_layers in range(2, 200):
        for unit in units_to_try(n_layers):
            pieces = generic("any").pieces(0, n_layers, unit)
            assert len(pieces) <= 8
            assert [start for start, _ in pieces] == list(range(0, n_layers, unit))
            assert pieces[-1][1] == n_layers


@pytest.mark.slow
def test_worker_checks_on_demand_and_cuts_from_then_on(start_worker: StartWorker, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", family("bitnet"))
    assert build_manifest(path).cut_alignment == 0
    asked = start_worker()
    asked.open(path)
    answer = asked.call(ipc.CheckCuts).message
    assert isinstance(answer, ipc.CutsChecked)
    assert (answer.cut_alignment, answer.whole_reason) == (1, "")
    told = start_worker()
    assert told.open(path, (0, 3), (3, 8), checked_unit=1).cut_alignment == 1
