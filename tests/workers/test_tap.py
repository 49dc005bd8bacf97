"""The C tap is built, and it and the Python one notice a graph that is not as promised."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.engine.tap import Rescaling, Tap, find_library
from swarmllm_workers.errors import CallError

from .conftest import MakeModel


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: the tap is optional then")
def test_native_tap_was_built() -> None:
    assert find_library() is not None


def run_tapped(path: Path, tap: Tap, n_embd: int = 64) -> np.ndarray:
    model = Model(path)
    settings = ContextSettings(
        n_ctx=64, n_slots=1, n_threads=1, eval_callback=tap.callback, eval_user_data=tap.user_data
    )
    context = Context(model, settings)
    rows = np.random.default_rng(0).standard_normal((3, n_embd)).astype(np.float32)
    try:
        tap.arm(rows)
        context.decode(rows, np.arange(3), np.zeros(3), np.ones(3))
        return tap.take(3).copy()
    finally:
        context.close()
        model.close()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("output", "overwritten"), [("l_out-9", ""), ("l_out-3", "nothing"), ("Kcur-0", "")])
def test_missing_or_misshapen_tensor_is_an_error(
    make_model: MakeModel, native: bool, output: str, overwritten: str
) -> None:
    tap = Tap(output_name=output, input_name=overwritten, n_embd=64, n_rows_max=8, native=native)
    with pytest.raises(CallError, match="cannot be cut"):
        run_tapped(make_model("llama"), tap)


@pytest.mark.parametrize("native", [True, False])
def test_overwritten_input_decides_the_output(make_model: MakeModel, native: bool) -> None:
    """Hidden states put in behind layer 2 skip the layers before it."""
    path = make_model("llama")
    plain = run_tapped(
        path, Tap(output_name="l_out-3", input_name="", n_embd=64, n_rows_max=8, native=native)
    )
    tap = Tap(output_name="l_out-3", input_name="l_out-2", n_embd=64, n_rows_max=8, native=native)
    overwritten = run_tapped(path, tap)
    assert np.isfinite(overwritten).all()
    assert not np.array_equal(plain, overwritten)


@pytest.mark.parametrize("native", [True, False])
def test_factor_is_put_right_only_where_it_is_the_one_expected(make_model: MakeModel, native: bool) -> None:
    """gemma2 scales its queries by 1/sqrt(16) here."""

    def run(rescaling: Rescaling | None) -> np.ndarray:
        tap = Tap(
            output_name="l_out-5",
            input_name="",
            n_embd=96,
            n_rows_max=8,
            native=native,
            rescaling=rescaling,
        )
        return run_tapped(make_model("gemma2"), tap, n_embd=96)

    plain = run(None)
    np.testing.assert_array_equal(run(Rescaling(0.25, 0.25, 6)), plain)
    assert not np.array_equal(run(Rescaling(0.25, 0.5, 6)), plain)
    for wrong in (Rescaling(0.125, 0.5, 6), Rescaling(0.25, 0.5, 5)):
        with pytest.raises(CallError, match="cannot be cut"):
            run(wrong)
