"""Averages of what layers took, and the first guess before any have run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.scheduling.speeds import (
    MAX_MODELS,
    SLOWEST_HOP_S,
    Latency,
    MachineSpeed,
    Observations,
    roofline,
)


def test_ranges_and_chunks_of_any_size_feed_the_same_number() -> None:
    observations = Observations()
    observations.observe("m", "decode", 0.012, n_layers=12, n_rows=1)
    observations.observe("m", "decode", 0.004, n_layers=4, n_rows=1)
    observations.observe("m", "prefill", 0.128, n_layers=4, n_rows=128)
    latency = observations.latency("m")
    assert latency.decode_s == pytest.approx(0.001)
    assert latency.prefill_s == pytest.approx(0.00025)


def test_the_average_moves_a_fifth_of_the_way() -> None:
    observations = Observations()
    for compute_s in (0.010, 0.020):
        observations.observe("m", "decode", compute_s, 1, 1)
    assert observations.latency("m").decode_s == pytest.approx(0.012)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1))
def test_the_average_stays_between_the_extremes(times_s: list[float]) -> None:
    observations = Observations()
    for compute_s in times_s:
        observations.observe("m", "decode", compute_s, 1, 1)
    average_s = observations.latency("m").decode_s
    assert average_s is not None
    assert min(times_s) * (1 - 1e-9) <= average_s <= max(times_s) * (1 + 1e-9)


def test_hops_are_averaged_alike_and_a_hiccup_counts_little() -> None:
    observations = Observations()
    for handling_s in (0.001, 0.002):
        observations.observe_hop(handling_s)
    assert observations.hop_s == pytest.approx(0.0012)
    observations.observe_hop(3600.0)
    assert observations.hop_s == pytest.approx(0.0012 + 0.2 * (SLOWEST_HOP_S - 0.0012))


@pytest.mark.parametrize(
    ("compute_s", "n_layers", "n_rows"), [(0.0, 1, 1), (-1.0, 1, 1), (1.0, 0, 1), (1.0, 1, 0)]
)
def test_nonsense_is_not_averaged(compute_s: float, n_layers: int, n_rows: int) -> None:
    observations = Observations()
    observations.observe("m", "decode", compute_s, n_layers, n_rows)
    assert observations.latency("m") == Latency()


def test_the_model_that_ran_longest_ago_is_forgotten_first() -> None:
    observations = Observations()
    for i in range(MAX_MODELS):
        observations.observe(f"m{i}", "decode", 1.0, 1, 1)
    observations.observe("m0", "prefill", 1.0, 1, 1)
    observations.observe("new", "decode", 1.0, 1, 1)
    kept = [model_id for model_id, _ in observations.latest()]
    assert len(kept) == MAX_MODELS
    assert kept[:2] == ["new", "m0"]
    assert "m1" not in kept


def test_the_roofline_is_the_slower_of_reading_and_multiplying() -> None:
    reading = roofline(MachineSpeed(1e9, 1e12), layer_bytes=1e6, layer_weights=1e6)
    assert reading.decode_s == pytest.approx(1e-3)
    assert reading.prefill_s == pytest.approx(1e-3 / 128)
    multiplying = roofline(MachineSpeed(1e12, 1e9), layer_bytes=1e6, layer_weights=1e6)
    assert multiplying == Latency(pytest.approx(2e-3), pytest.approx(2e-3))
    assert roofline(MachineSpeed(), 1e6, 1e6) == Latency()
    # What it multiplies is not known.
    assert roofline(MachineSpeed(1e9), 1e6, 1e6) == reading
