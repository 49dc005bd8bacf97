"""Rows of pictures with further parts, which the first layers take (Qwen3-VL), beside rows of other slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vision_models import N_DEEPSTACK, text_model

from swarmllm_proto.picture_runs import PictureRun
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.row_widths import widened
from swarmllm_workers.engine.segment import Span

pytestmark = pytest.mark.slow

RUNS = (PictureRun(0, 12, 4),)
"""Twelve rows on three lines, and text behind them."""


def test_a_picture_of_one_slot_and_text_of_another_run_in_one_batch(tmp_path: Path) -> None:
    engine = Engine(text_model(tmp_path, "qwen3vl"), tmp_path / "cache", EngineSettings(n_ctx=256, n_slots=3))
    engine.layers.load(0, 3)
    (segment,) = engine.layers.segments
    n_embd = engine.n_embd
    rng = np.random.default_rng(0)
    assert engine.n_embd_input == n_embd * (1 + N_DEEPSTACK)
    wide = rng.standard_normal((12, engine.n_embd_input)).astype(np.float32)
    text = rng.standard_normal((5, n_embd)).astype(np.float32)
    after = rng.standard_normal((1, n_embd)).astype(np.float32)
    # Alone, each in a slot of its own.
    (seen,) = (found.copy() for found in segment.run([Span(0, 0, wide, "hidden", RUNS)]))
    (then,) = (found.copy() for found in segment.run([Span(0, 12, after, "hidden")]))
    (read,) = (found.copy() for found in segment.run([Span(1, 0, text, "hidden")]))
    (bare,) = (found.copy() for found in segment.run([Span(2, 0, wide[:, :n_embd], "hidden", RUNS)]))
    assert np.abs(bare - seen).max() > 0.1, "the further parts count"
    for slot in range(3):
        segment.truncate(slot, 0)
    both = segment.run([Span(0, 0, text, "hidden"), Span(1, 0, wide, "hidden", RUNS)])
    assert np.array_equal(both[0], read)
    assert np.array_equal(both[1], seen)
    # Zeros behind a row of text are nothing.
    zeros = widened(after, engine.n_embd_input)
    assert np.array_equal(segment.run([Span(1, 12, zeros, "hidden")])[0], then)
    engine.close()
