"""Bandwidth is learnt from large messages, whatever pieces they come in."""

from __future__ import annotations

from swarmllm.swarm.data.transfer_pacing import MEASURED_BYTES_MIN, WEIGHT, Throughput


def feed(throughput: Throughput, n_bytes: int, bytes_per_s: float, since_s: float) -> float:
    """One message in pieces of 64 KiB, its header first; returns when it ended."""
    now = since_s
    throughput.arrived(40, now)
    for start in range(0, n_bytes, 65536):
        piece = min(65536, n_bytes - start)
        now += piece / bytes_per_s
        throughput.arrived(piece, now)
    throughput.message_ended(now)
    return now


def test_a_large_message_tells_and_the_wait_before_it_does_not_count() -> None:
    throughput = Throughput()
    ended_s = feed(throughput, 4 * MEASURED_BYTES_MIN, 1e7, 0.0)
    assert throughput.bytes_per_s is not None
    assert abs(throughput.bytes_per_s / 1e7 - 1) < 1e-6
    feed(throughput, 4 * MEASURED_BYTES_MIN, 2e7, ended_s + 3600)
    assert abs(throughput.bytes_per_s / (1e7 + WEIGHT * 1e7) - 1) < 1e-6


def test_small_messages_and_a_clock_that_stands_still_tell_nothing() -> None:
    throughput = Throughput()
    feed(throughput, MEASURED_BYTES_MIN - 1, 1e7, 0.0)
    assert throughput.bytes_per_s is None
    throughput.arrived(40, 5.0)
    throughput.arrived(2 * MEASURED_BYTES_MIN, 5.0)
    throughput.message_ended(5.0)
    assert throughput.bytes_per_s is None
