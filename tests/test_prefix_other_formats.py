"""Real daemons: KV that another node keeps as another type, or got as rounded rows, comes too."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_process import wait_for
from deadlines import DEADLINE_S
from prefix_daemons import (
    N_SLOW_PROMPT,
    OUTCOMES,
    PROMPT,
    SLOW,
    TRIES,
    add_slow,
    announced,
    ask,
    counted,
    is_near,
    members,
    n_cached,
)

from bench.common.shapes import build
from swarmllm_proto.blocks import BLOCK_TOKENS

pytestmark = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kv_type": "q8_0"}, {"activation_compression": "q8_0"}])
def test_kv_of_another_format_comes_too_and_the_answer_says_so(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    path = build(SLOW, tmp_path / "slow.gguf")
    assert any(takes_other_format(tmp_path / str(i), path, settings) for i in range(TRIES))


def takes_other_format(folder: Path, path: Path, settings: dict[str, str]) -> bool:
    """False: the machine was too busy for it to be fetched."""
    folder.mkdir()
    with members(folder, "first", "second", last=settings, local_embedding_privacy=True) as (first, second):
        add_slow(first, path)
        fields = {"model": "slow", "prompt": PROMPT[:N_SLOW_PROMPT], "ignore_eos": True}
        cold = ask(first, **fields)
        assert cold["swarm"]["exact"]
        add_slow(second, path)
        wait_for(lambda: announced(second).get("first", 0) > 0, DEADLINE_S, "the announcement")
        wait_for(lambda: is_near(second), DEADLINE_S, "a short round trip")
        warm = ask(second, **fields)
        whole = (cold["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if n_cached(warm) < whole:
            assert sum(counted(second)[f'fetches_total{{outcome="{each}"}}'] for each in OUTCOMES) > 0
            return False
        prefix = warm["swarm"]["prefix"]
        assert (prefix["tokens"], prefix["other_format"]) == (whole, True)
        assert not warm["swarm"]["exact"]
        wait_for(lambda: counted(second)['checks_total{outcome="right"}'] == 1, DEADLINE_S, "the check")
        # It stays what it is, and is nobody else's.
        again = ask(second, **fields)
        assert n_cached(again) >= whole
        assert not again["swarm"]["exact"]
        assert again["swarm"]["prefix"] is None
        exact = ask(second, **fields | {"exact": True, "prompt": PROMPT[: 4 * BLOCK_TOKENS + 1]})
        assert n_cached(exact) == 0
        assert exact["swarm"]["exact"]
        assert announced(first).get("second", 0) == 0
    return True
