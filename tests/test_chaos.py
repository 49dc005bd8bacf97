"""Real processes: nodes are killed and frozen under running streams, and every stream completes as if nothing
had been. A short piece of `python -m bench.chaos`."""

from __future__ import annotations

import pytest

from bench.chaos import PROMPTS, Chaos, chaos, run
from swarmllm.cli.client import Client

pytestmark = pytest.mark.slow


def test_streams_complete_with_the_same_text_whatever_dies() -> None:
    with chaos() as swarm:
        before, streams = run(swarm, n_streams=6, n_disturbed=3, n_tokens=60, seed=7)
    texts = {stream.prompt: stream.text for stream in before}
    assert all(texts.values())
    assert [stream.error for stream in streams] == [""] * 6
    assert [stream.text for stream in streams] == [texts[stream.prompt] for stream in streams]
    # Where whoever could be disturbed is down already, nothing is done.
    assert any(stream.disturbed_by for stream in streams)
    assert any(stream.n_recoveries for stream in streams)
    assert any(stream.n_rebuilt for stream in streams)


def test_a_stream_waits_for_its_only_neighbour_and_follows_it_to_another_address() -> None:
    """b has what nobody else has; it is killed under the stream, and comes back on other ports."""
    with chaos({"a": ["guide:0:6"], "b": ["guide:6:12"]}, ways=("kill",)) as swarm:
        before = peer_addresses(swarm)
        (undisturbed,), (stream,) = run(swarm, 1, 1, n_tokens=60, seed=11, prompts=PROMPTS[:1])
        after = peer_addresses(swarm)
    assert (stream.disturbed_by, stream.error, stream.n_recoveries) == ("kill", "", 1)
    assert stream.text == undisturbed.text != ""
    assert before
    assert not before & after


def peer_addresses(swarm: Chaos) -> set[str]:
    with Client(swarm.url) as client:
        (peer,) = client.get("/api/admin/peers")["peers"]
    return set(peer["addresses"])
