"""Real daemons: KV of a prompt that one node computed goes to another that is asked the same, if wanted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S
from prefix_daemons import (
    INFERENCE,
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
def test_a_member_that_is_asked_the_same_takes_the_kv_of_the_one_that_computed_it(tmp_path: Path) -> None:
    path = build(SLOW, tmp_path / "slow.gguf")
    assert any(takes_it(tmp_path / str(i), path) for i in range(TRIES))


def takes_it(folder: Path, path: Path) -> bool:
    """False: the machine was too busy for it to be fetched."""
    folder.mkdir()
    # With this setting the other one gets no tokens, so what it knows of a prompt does not count there.
    with members(folder, "first", "second", local_embedding_privacy=True) as (first, second):
        add_slow(first, path)
        fields = {"model": "slow", "prompt": PROMPT[:N_SLOW_PROMPT], "ignore_eos": True}
        cold = ask(first, **fields)
        # Before, the first one might have had it computed here.
        add_slow(second, path)
        wait_for(lambda: announced(second).get("first", 0) > 0, DEADLINE_S, "the announcement")
        # A way that nobody has measured, or only once while the other node was starting, counts as long.
        wait_for(lambda: is_near(second), DEADLINE_S, "a short round trip")
        warm = ask(second, **fields)
        n_prompt = cold["usage"]["prompt_tokens"]
        whole = (n_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert n_cached(cold) == 0
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
        if n_cached(warm) < whole:
            assert sum(counted(second)[f'fetches_total{{outcome="{each}"}}'] for each in OUTCOMES) > 0
            return False
        prefix = warm["swarm"]["prefix"]
        assert (prefix["node"], prefix["tokens"]) == (first.node_id, whole)
        assert prefix["bytes"] > 0
        assert cold["swarm"]["prefix"] is None
        # A block and the last one are computed again; then it is the second one's to give.
        wait_for(lambda: counted(second)['checks_total{outcome="right"}'] == 1, DEADLINE_S, "the check")
        wait_for(lambda: announced(first)["second"] > 0, DEADLINE_S, "the second one's announcement")
        assert counted(second)['fetches_total{outcome="hit"}'] == 1
        assert counted(second)["fetched_bytes_total"] == counted(first)["given_bytes_total"] > 0
        # What is here is not fetched again, and exact requests take nothing from anybody.
        again = ask(second, **fields)
        assert n_cached(again) == n_prompt - 1
        assert again["swarm"]["prefix"] is None
        exact = ask(second, **fields | {"exact": True, "prompt": PROMPT[: 4 * BLOCK_TOKENS + 1]})
        assert n_cached(exact) == 0
        assert exact["swarm"]["prefix"] is None
    return True


@pytest.mark.slow
def test_in_an_open_swarm_prompts_are_announced_by_whoever_wants_it(tmp_path: Path) -> None:
    sharing = INFERENCE | {"share_prefix_cache_with_peers": "on"}
    with ExitStack() as stack:
        b = stack.enter_context(running_daemon(tmp_path, "open", load=["guide"], inference=sharing))
        # While it is alone: another node that is quicker would be given the prompt.
        ask(b)
        own = INFERENCE | {"local_embedding_privacy": True}
        joining = running_daemon(tmp_path, "silent", load=["guide"], inference=own, bootstrap=b.addresses)
        a = stack.enter_context(joining)
        known = [*a.addresses, *b.addresses]
        seer = stack.enter_context(running_daemon(tmp_path, "seer", load=[], bootstrap=known))
        wait_for(lambda: announced(seer).keys() == {"silent", "open"}, DEADLINE_S, "both records")
        wait_for(lambda: announced(seer)["open"] > 0, DEADLINE_S, "the announcement")
        wait_for(lambda: announced(a)["open"] > 0, DEADLINE_S, "the announcement at the other one")
        assert n_cached(ask(a)) == 0
        assert announced(seer)["silent"] == 0
        seen = seer.http.get("/api/admin/peers/open").json()
        assert seen["connected"]["announced_prefixes"] > 0
