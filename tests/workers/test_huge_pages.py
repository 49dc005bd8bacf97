"""Files that are written in whole pages hold what was written, and holes stay holes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm_workers.engine.huge_pages import GAP_MAX, HUGE_PAGE, PageWriter, read_in

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
