"""Files that are written in whole pages hold what was written, and holes stay holes."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.engine import huge_pages
from swarmllm_workers.engine.huge_pages import GAP_MAX, HUGE_PAGE, PageWriter, read_anew, read_in
from swarmllm_workers.engine.libllama import Model

from .conftest import MakeModel
from .factory import Spec

RUNS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 31, GAP_MAX, GAP_MAX + 1, HUGE_PAGE - 3, HUGE_PAGE, 3 * HUGE_PAGE]),
        st.sampled_from([1, 32, 5000, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 7]),
    ),
    min_size=1,
    max_size=6,
)
"""(bytes left out, bytes written) one after the other."""


@settings(max_examples=30)
@given(runs=RUNS, seed=st.integers(0, 99))
def test_file_holds_what_was_written(
    runs: list[tuple[int, int]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("pages") / "file"
    expected = bytearray()
    with path.open("wb") as file, PageWriter(file.fileno()) as pages:
        for n_left_out, n_bytes in runs:
            expected += bytes(n_left_out)
            data = random.bytes(n_bytes)
            pages.write(len(expected), data)
            expected += data
    assert path.read_bytes() == expected


def test_what_is_left_out_takes_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file, PageWriter(file.fileno()) as pages:
        pages.write(0, b"head")
        pages.write(16 * HUGE_PAGE, b"tail")
    assert path.stat().st_size == 16 * HUGE_PAGE + 4
    assert path.stat().st_blocks * 512 <= 64 * 1024


def test_whole_pages_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the pieces that come: only then does the page cache make huge pages."""
    written: list[tuple[int, int]] = []

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        written.append((offset, len(data)))
        return real(file, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    with (tmp_path / "file").open("wb") as file, PageWriter(file.fileno()) as pages:
        for offset in range(0, 2 * HUGE_PAGE + 2**16, 2**16):
            pages.write(offset, bytes(2**16 - 32))  # as between two tensors, some bytes are left out
    assert written == [(0, HUGE_PAGE), (HUGE_PAGE, HUGE_PAGE), (2 * HUGE_PAGE, 2**16 - 32)]


def test_reading_in_leaves_files_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(HUGE_PAGE + 100)
    path.write_bytes(data)
    read_in(path)
    assert path.read_bytes() == data
    read_in(tmp_path / "missing")


def test_what_is_read_anew_is_the_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(5 * HUGE_PAGE + 100)
    path.write_bytes(data)
    read: list[int] = []
    read_anew(path, [(100, HUGE_PAGE), (3 * HUGE_PAGE - 7, 5 * HUGE_PAGE + 100)], read.append)
    assert sum(read) == HUGE_PAGE - 100 + 2 * HUGE_PAGE + 107
    assert path.read_bytes() == data
    read_anew(tmp_path / "missing", [(0, 1)], read.append)


@pytest.mark.parametrize(
    ("shares", "n_drops"),
    [([1, 1, 1], 0), ([0, 1, 1, 0, 1], 2), ([0, 0, 0, 0], 1)],
    ids=["in huge pages", "in small ones, some of it", "in small ones, and stays so"],
)
def test_small_pages_are_dropped_where_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[int], n_drops: int
) -> None:
    """Of three stretches; each look finds so much of one in huge pages."""
    looks = iter(shares)
    drops: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "_in_huge_pages", lambda _file, _at, size: next(looks) * size)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, at, size, _how: drops.append((at, size)))
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(3 * huge_pages._WINDOW)
    read: list[int] = []
    read_in(path, read.append)
    assert read == [huge_pages._WINDOW] * 3
    assert len(drops) == n_drops
    assert next(looks, None) is None


@pytest.mark.parametrize(("seconds", "n_drops"), [(0.3, 4), (1.0, 2), (5.0, 1)])
def test_a_slow_disk_is_waited_for_no_longer_than_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, n_drops: int
) -> None:
    """Each of four stretches takes so long to be read again."""
    now_s = 0.0
    looks: list[int] = []
    drops: list[int] = []

    def look(_file: int, at: int, size: int) -> int:
        nonlocal now_s
        is_again = at in looks
        looks.append(at)
        now_s += seconds if is_again else 0.0
        return size if is_again else 0

    monkeypatch.setattr(huge_pages, "_in_huge_pages", look)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, at, _size, _how: drops.append(at))
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(4 * huge_pages._WINDOW)
    read_in(path)
    assert len(drops) == n_drops


@pytest.mark.parametrize(("seconds", "n_small"), [(0.001, 0), (1.0, 2)], ids=["at hand", "have to be made"])
def test_cells_are_filled_in_with_huge_pages_while_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, seconds: float, n_small: int
) -> None:
    """Where it is not, what is left gets small ones."""
    now_s = 0.0
    asked: list[tuple[int, int, int]] = []

    def madvise(address: int, size: int, advice: int) -> int:
        nonlocal now_s
        asked.append((address, size, advice))
        now_s += seconds if advice == huge_pages.POPULATE_WRITE else 0
        return 0

    monkeypatch.setattr(huge_pages.libc, "madvise", madvise)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    at_once = huge_pages._FILLED_AT_ONCE
    huge_pages.fill_in(4096, 2 * at_once + 100)
    filled = [(4096, at_once), (4096 + at_once, at_once), (4096 + 2 * at_once, 100)]
    assert [each[:2] for each in asked if each[2] == huge_pages.POPULATE_WRITE] == filled
    assert asked[0] == (4096, 2 * at_once + 100, mmap.MADV_HUGEPAGE)
    assert len([each for each in asked if each[2] == mmap.MADV_NOHUGEPAGE]) == n_small


def test_reading_in_is_the_first_half_of_loading(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model(Spec("llama", n_layers=1))
    n_bytes = path.stat().st_size

    def read(_: Path, on_read: Callable[[int], None]) -> None:
        on_read(n_bytes // 2)
        on_read(n_bytes - n_bytes // 2)

    monkeypatch.setattr(huge_pages, "read_in", read)
    told: list[float] = []
    Model(path, on_progress=told.append).close()
    assert told[:2] == [pytest.approx(0.25, abs=0.01), 0.5]
    assert told == sorted(told)
    assert told[-1] == 1.0
