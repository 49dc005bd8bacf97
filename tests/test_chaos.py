"""Real processes: nodes are killed and frozen under running streams, and every stream completes as if nothing
had been. A short piece of `python -m bench.chaos`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from daemon_process import wait_for
from deadlines import DEADLINE_S

from bench.chaos import ALL_ON, PROMPTS, Chaos, Stream, chaos, run
from swarmllm.cli.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("forked_demo_nodes")]


MAX_TRIES = 10
"""A blow may fall when the whole answer is on its way to the reader already, or when whoever could be
disturbed is down: then it has shown nothing."""


@pytest.mark.parametrize("inference", [{}, ALL_ON], ids=["default", "all"])
def test_streams_complete_with_the_same_text_whatever_dies(inference: Mapping[str, Any]) -> None:
    """ "all": KV of prompts, prompts and the draft model at the last stage, and packed rows."""
    all_streams: list[Stream] = []
    with chaos(**inference) as swarm:
        for seed in range(7, 7 + MAX_TRIES):
            before, streams = run(swarm, n_streams=6, n_disturbed=3, n_tokens=60, seed=seed)
            texts = {stream.prompt: stream.text for stream in before}
            assert all(texts.values())
            assert [stream.error for stream in streams] == [""] * 6
            assert [stream.text for stream in streams] == [texts[stream.prompt] for stream in streams]
            all_streams += streams
            if any(stream.n_rebuilt for stream in all_streams):
                break
    assert any(stream.disturbed_by for stream in all_streams)
    assert any(stream.n_recoveries for stream in all_streams)
    assert any(stream.n_rebuilt for stream in all_streams)


def test_a_stream_waits_for_its_only_neighbour_and_follows_it_to_another_address() -> None:
    """b has what nobody else has; it is killed under the stream, and comes back on other ports."""
    with chaos({"a": ["guide:0:6"], "b": ["guide:6:12"]}, ways=("kill",)) as swarm:
        for seed in range(11, 11 + MAX_TRIES):
            before = peer_addresses(swarm)
            (undisturbed,), (stream,) = run(swarm, 1, 1, n_tokens=60, seed=seed, prompts=PROMPTS[:1])
            assert (stream.disturbed_by, stream.error) == ("kill", "")
            assert stream.text == undisturbed.text != ""
            if stream.n_recoveries:
                break
        after = peer_addresses(swarm)
    assert stream.n_recoveries
    assert before
    assert not before & after


def peer_addresses(swarm: Chaos) -> set[str]:
    with Client(swarm.url) as client:
        (peer,) = wait_for(lambda: client.get("/api/admin/peers")["peers"], DEADLINE_S, "the neighbour")
    return set(peer["addresses"])
