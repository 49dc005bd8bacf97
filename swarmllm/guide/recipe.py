"""What decides the weights: the phases of a training and their learning rates.

A phase sets several things at once, because they belong together: what is talked about, how many
conversations only ask to repeat random words, how fast queries and keys learn beside the other matrices, and
the course of the learning rate. Copying needs sharp attention and came late without the echoes and the faster
queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from .corpus import FINISH_MIX, HARD_MIX, PRACTICE_MIX, WIDE_MIX, Mix

LEAST_RATE_SHARE = 0.02
"""A falling learning rate ends here."""


@dataclass(frozen=True)
class Phase:
    """Rates rise over `warm_up_steps`, stay at `peak`, and fall linearly over the last `fall_steps`."""

    n_steps: int
    echo_share: float = 0.0
    mix: Mix = WIDE_MIX
    query_key_share: float = 1.0
    peak: float = 1.0
    warm_up_steps: int = 0
    fall_steps: int = 0

    def rate_share(self, step: int) -> float:
        """Share of the full learning rate at this step of the phase."""
        share = self.peak
        if self.warm_up_steps:
            share *= min(1.0, (step + 1) / self.warm_up_steps)
        if self.fall_steps:
            share *= max(LEAST_RATE_SHARE, min(1.0, (self.n_steps - step) / self.fall_steps))
        return share


@dataclass(frozen=True)
class Recipe:
    """`n_batch_tokens` counts positions, padding included; the data of each phase has a seed of its own."""

    phases: tuple[Phase, ...]
    n_batch_tokens: int = 2048
    seed: int = 1
    n_threads: int = 1
    bf16: bool = True
    compiled: bool = True
    muon_rate: float = 0.006
    adam_rate: float = 0.002

    @property
    def n_steps(self) -> int:
        return sum(phase.n_steps for phase in self.phases)

    def at(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the step within it."""
        for phase in self.phases:
            if step < phase.n_steps:
                return phase, step
            step -= phase.n_steps
        raise ValueError(f"the recipe has {self.n_steps} steps")


GUIDE_PHASES = (
    Phase(800, query_key_share=0.5, warm_up_steps=100),
    Phase(1500, echo_share=0.2, query_key_share=2.0, fall_steps=920),
    Phase(
        900, echo_share=0.06, mix=HARD_MIX, query_key_share=2.0, peak=0.7, warm_up_steps=30, fall_steps=820
    ),
    Phase(
        1300,
        echo_share=0.05,
        mix=PRACTICE_MIX,
        query_key_share=2.0,
        peak=0.6,
        warm_up_steps=30,
        fall_steps=1250,
    ),
    Phase(
        600, echo_share=0.05, mix=FINISH_MIX, query_key_share=2.0, peak=0.5, warm_up_steps=30, fall_steps=570
    ),
)
DRAFT_PHASES = (
    Phase(800, query_key_share=0.5, warm_up_steps=100),
    Phase(700, echo_share=0.2, query_key_share=2.0, fall_steps=600),
)
