"""Real processes: nodes are killed and frozen under running streams, and every stream completes as if nothing
had been. A short piece of `python -m bench.chaos`."""

from __future__ import annotations

import pytest

from bench.chaos import chaos, run

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
