"""The phases of the training: which step belongs where, and how the learning rate runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.guide.recipe import DRAFT_PHASES, GUIDE_PHASES, LEAST_RATE_SHARE, Phase, Recipe

phases = st.builds(
    Phase,
    n_steps=st.integers(1, 50),
    peak=st.floats(0.1, 1.0),
    warm_up_steps=st.integers(0, 20),
    fall_steps=st.integers(0, 50),
)


@given(st.lists(phases, min_size=1, max_size=4))
def test_every_step_belongs_to_one_phase_in_order(chosen: list[Phase]) -> None:
    recipe = Recipe(tuple(chosen))
    walked = [recipe.at(step) for step in range(recipe.n_steps)]
    assert walked == [(phase, step) for phase in chosen for step in range(phase.n_steps)]
    with pytest.raises(ValueError, match="steps"):
        recipe.at(recipe.n_steps)


@given(phases)
def test_a_learning_rate_never_exceeds_its_peak_and_never_stops(phase: Phase) -> None:
    for step in range(phase.n_steps):
        assert 0 < phase.rate_share(step) <= phase.peak


@pytest.mark.parametrize("last", [GUIDE_PHASES[-1], DRAFT_PHASES[-1]])
def test_a_recipe_ends_at_a_low_rate(last: Phase) -> None:
    assert last.rate_share(last.n_steps - 1) <= 2 * LEAST_RATE_SHARE
