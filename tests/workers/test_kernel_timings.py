"""The file of a machine's kernel timings: what is not whole, possible and of this machine is not there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.kernels import kernel_tuning
from swarmllm_workers.kernels.kernel_choice import ROW_CLASSES, RowChoice, Way
from swarmllm_workers.kernels.kernel_tuning import (
    FILE_BYTES_MAX,
    SHAPES_MAX,
    ProductShape,
    Timings,
    read_timings,
    write_timings,
)

MACHINE = "EPYC (family 25, model 17); 00"
SHAPE = ProductShape(896, 2, False)
ALL = tuple(Way)


def choices(way: Way = Way.AVX512) -> tuple[RowChoice, ...]:
    ours = [1000 if rows.first % 2 else None for rows in ROW_CLASSES]
    return tuple(
        RowChoice(rows, way, 2000 + rows.first, ours_ns)
        for rows, ours_ns in zip(ROW_CLASSES, ours, strict=True)
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    timings: Timings = {SHAPE: choices(), ProductShape(4864, 1, True): choices(Way.DOTS)}
    write_timings(tmp_path / "t.json", MACHINE, timings)
    assert read_timings(tmp_path / "t.json", MACHINE, ALL) == timings
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").stat().st_mode & 0o077 == 0


def test_of_another_machine_there_is_nothing(tmp_path: Path) -> None:
    write_timings(tmp_path / "t.json", MACHINE, {SHAPE: choices()})
    assert read_timings(tmp_path / "t.json", MACHINE + "1", ALL) == {}


def test_ways_that_this_processor_has_not_are_measured_anew(tmp_path: Path) -> None:
    """Else it would meet an instruction that it does not know."""
    timings: Timings = {SHAPE: choices(Way.AVX512), ProductShape(64, 1, True): choices(Way.AVX2)}
    write_timings(tmp_path / "t.json", MACHINE, timings)
    assert set(read_timings(tmp_path / "t.json", MACHINE, (Way.DOTS, Way.TILES, Way.AVX2))) == {
        ProductShape(64, 1, True)
    }


def valid() -> dict[str, Any]:
    return {
        "machine": MACHINE,
        "entries": [
            {
                "shape": {"k": 896, "n_threads": 1, "is_cached": False},
                "classes": [[3, 2000, 1000]] * len(ROW_CLASSES),
            }
        ],
    }


def broken(change: str) -> Any:
    file = valid()
    entry = file["entries"][0]
    match change:
        case "way":
            entry["classes"][3] = [len(Way), 1, 1]
        case "negative":
            entry["classes"][3] = [1, -1, 1]
        case "classes":
            entry["classes"].pop()
        case "k":
            entry["shape"]["k"] = 2**40
        case "threads":
            entry["shape"]["n_threads"] = 0
        case "field":
            entry["else"] = 1
        case "entries":
            file["entries"] = [entry] * (SHAPES_MAX + 1)
        case "list":
            return [file]
    return file


@pytest.mark.parametrize("change", ["way", "negative", "classes", "k", "threads", "field", "entries", "list"])
def test_what_is_not_possible_is_measured_anew(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(valid()))
    assert set(read_timings(path, MACHINE, ALL)) == {ProductShape(896, 1, False)}
    path.write_text(json.dumps(broken(change)))
    with caplog.at_level(logging.WARNING):
        assert read_timings(path, MACHINE, ALL) == {}
    assert "measured anew" in caplog.text


@given(
    st.binary(max_size=300)
    | st.text(max_size=300).map(str.encode)
    | st.integers(0, 400).map(lambda n: json.dumps(valid()).encode()[:n])
)
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    assert set(read_timings(path, MACHINE, ALL)) in (set(), {ProductShape(896, 1, False)})


def test_nothing_is_read_of_what_is_too_large_or_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(valid()) + " " * FILE_BYTES_MAX)
    assert read_timings(path, MACHINE, ALL) == {}
    assert read_timings(tmp_path, MACHINE, ALL) == {}
    assert read_timings(tmp_path / "none.json", MACHINE, ALL) == {}


def test_what_cannot_be_written_is_measured_next_time(tmp_path: Path) -> None:
    write_timings(tmp_path / "no" / "t.json", MACHINE, {SHAPE: choices()})
    (tmp_path / "folder").mkdir()
    write_timings(tmp_path / "folder", MACHINE, {SHAPE: choices()})
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_arm_is_named_by_implementer_and_part() -> None:
    told = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n"
    name, features = kernel_tuning.read_processor(told)
    assert name.endswith(" (implementer 0x41, part 0xd0b)")
    assert features == "fp asimd asimddp"


def test_the_key_names_processor_and_builds(tmp_path: Path) -> None:
    name, _ = kernel_tuning.processor()
    (tmp_path / "a.so").write_bytes(b"1")
    first = kernel_tuning.machine_key([tmp_path / "a.so"])
    assert first.startswith(f"{name}; ")
    assert first == kernel_tuning.machine_key([tmp_path / "a.so"])
    (tmp_path / "a.so").write_bytes(b"2")
    assert first != kernel_tuning.machine_key([tmp_path / "a.so"])
