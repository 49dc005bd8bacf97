"""Copies of layers: what nobody uses goes, oldest first, and what a worker runs from stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.models.segment_copies import UNUSED_S, YOUNG_S, SegmentCopies
from swarmllm_workers.engine.libllama import _mark_used

N_BYTES = 2**16
GIB = 2**30
DAY_S = 86400.0


def copy(folder: Path, name: str, age_s: float) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.gguf"
    path.write_bytes(bytes(N_BYTES))
    used_s = time.time() - age_s
    os.utime(path, (used_s, used_s))
    return path


def left(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


def test_what_was_not_used_for_long_goes_and_nothing_else(tmp_path: Path) -> None:
    for name, age_s in (("new", 0.0), ("week", UNUSED_S + 60), ("days", UNUSED_S - DAY_S)):
        copy(tmp_path, name, age_s)
    (tmp_path / ".unfinished.gguf.7").touch()
    (tmp_path / "check-x").mkdir()
    copies = SegmentCopies(tmp_path, 0)
    assert copies.tidy() == 1
    assert left(tmp_path) == [".unfinished.gguf", "check-x", "days", "new"]
    assert (copies.view().n_files, copies.view().n_bytes) == (2, 2 * N_BYTES)


def test_over_the_quota_the_least_recently_used_go_first_and_none_that_is_young(tmp_path: Path) -> None:
    for name, age_s in (("b", 3 * DAY_S), ("a", DAY_S), ("c", 5 * DAY_S), ("young", YOUNG_S / 2)):
        copy(tmp_path, name, age_s)
    assert SegmentCopies(tmp_path, 3 * N_BYTES / GIB).tidy() == 1
    assert left(tmp_path) == ["a", "b", "young"]
    assert SegmentCopies(tmp_path, N_BYTES / 2 / GIB).tidy() == 2
    assert left(tmp_path) == ["young"]


def test_what_a_worker_runs_from_stays_and_counts_as_used_now(tmp_path: Path) -> None:
    old, other = copy(tmp_path, "old", 2 * UNUSED_S), copy(tmp_path, "other", UNUSED_S - DAY_S)
    in_use = _mark_used(old)
    assert in_use is not None
    copies = SegmentCopies(tmp_path, N_BYTES / 2 / GIB)
    assert copies.tidy() == 1
    assert (old.exists(), other.exists()) == (True, False)
    os.close(in_use)
    assert SegmentCopies(tmp_path, 0).tidy() == 0, "it was used until now"
    assert old.exists()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    path = copy(tmp_path, "old", 2 * UNUSED_S)
    script = (
        "import sys, pathlib, swarmllm_workers.engine.libllama as l;"
        "f = l._mark_used(pathlib.Path(sys.argv[1])); print(1, flush=True); sys.stdin.read()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"1\n"
        assert SegmentCopies(tmp_path, 0).tidy() == 0
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    os.utime(path, (0, 0))
    assert SegmentCopies(tmp_path, 0).tidy() == 1


def test_a_folder_that_is_not_there_has_no_copies(tmp_path: Path) -> None:
    copies = SegmentCopies(tmp_path / "none", 1)
    assert copies.tidy() == 0
    assert copies.view().n_files == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


@given(
    ages=st.lists(st.floats(0, 2 * UNUSED_S), max_size=6, unique=True),
    in_use=st.sets(st.integers(0, 5)),
    n_files=st.integers(1, 6),
)
def test_what_is_left_fits_or_is_needed(
    folders: Path, ages: list[float], in_use: set[int], n_files: int
) -> None:
    folder = folders / str(len(list(folders.iterdir())))
    paths = [copy(folder, str(number), age_s) for number, age_s in enumerate(ages)]
    locks = [_mark_used(path) for number, path in enumerate(paths) if number in in_use]
    try:
        SegmentCopies(folder, n_files * N_BYTES / GIB).tidy()
    finally:
        for lock in locks:
            assert lock is not None
            os.close(lock)
    there = [path.exists() for path in paths]
    needed = [number in in_use or age_s < YOUNG_S for number, age_s in enumerate(ages)]
    assert all(is_there for is_there, is_needed in zip(there, needed, strict=True) if is_needed)
    may_go = [n for n, is_needed in enumerate(needed) if there[n] and not is_needed]
    assert not may_go or sum(there) <= n_files
    gone = [ages[n] for n, is_there in enumerate(there) if not is_there]
    assert all(ages[n] <= min(gone, default=UNUSED_S) for n in may_go)
