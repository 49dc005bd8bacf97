"""Two nodes with distance, a narrow line and losses between them: slower, and otherwise the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from bench.common.wan_proxy import Wan
from bench.wan import node

from .conftest import DEADLINE_S, meet
from .test_data_plane import exchange


@pytest.mark.slow
async def test_over_a_lossy_line_nothing_is_lost_reordered_or_taken_for_dead(tmp_path: Path) -> None:
    wan = Wan(rtt_s=0.08, bytes_per_s=12.5e6, loss=0.01)
    payloads = [bytes([number]) * (number * 2000) for number in range(40)]
    async with (
        node(tmp_path, "b", "127.0.9.2", wan) as b,
        node(tmp_path, "a", "127.0.9.1", wan, *b.addresses) as a,
    ):
        await meet(a, b)
        await exchange(a, b, payloads)
        # Through the relay, not past it.
        assert [peer.data_plane for peer in a.peers()] == ["direct"]
        assert "127.0.9.2" in a.peers()[0].addresses[0]

        async def serve(sender: str, body: bytes) -> bytes:
            return bytes(300_000)

        async def ignore(sender: str, header: bytes, payload: memoryview) -> None:
            return None

        b.serve(serve, ignore)
        with trio.fail_after(DEADLINE_S):
            assert len(await a.request(b.node_id, b"hello", timeout_s=DEADLINE_S)) == 300_000
            assert len(await a.fetch(b.node_id, b"hello", timeout_s=DEADLINE_S)) == 300_000
        assert (a.connected(), b.connected()) == ({b.node_id}, {a.node_id})
