"""Settings of model transfers, and how long another node may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferSettings:
    share: bool = True
    """Whether others are given anything."""
    upload_bytes_s: float = 0.0
    """Given to others, all together; 0: no limit."""
    max_uploads: int = 4
    """Pieces that are read and sent at the same time."""
    max_waiting_uploads: int = 32
    """More are told to come back later."""
    upload_wait_s: float = 8.0
    """A node that would wait longer for the bandwidth limit is told to come back later."""
    lanes_per_holder: int = 4
    """Pieces asked of one node at the same time: hides the round trip."""
    max_holders: int = 8
    piece_timeout_s: float = 20.0
    max_failures: int = 3
    """In a row; then a holder is not asked any more in this fetch."""
    busy_pause_s: float = 0.25
    """Before a busy holder is asked again; doubles each time."""
    max_busy_pause_s: float = 4.0
    busy_timeout_s: float = 60.0
    """A holder that is busy for so long counts as gone."""
