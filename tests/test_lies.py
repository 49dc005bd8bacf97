"""One member of a swarm of real daemons tells well-formed untruths, and all go on: some of what
`python -m bench.lies --daemons` tells. (tests/lies/ has those that are told in memory.)"""

from __future__ import annotations

import math

import pytest

from bench.lies import SEED, run

N_LIES = 8


@pytest.mark.slow
@pytest.mark.usefixtures("forked_demo_nodes")
def test_a_member_lies_to_real_daemons_and_all_go_on() -> None:
    figures = run(SEED, math.inf, lies_max=N_LIES, daemons=True)
    assert figures.broken == []
    assert figures.n_lies == N_LIES
