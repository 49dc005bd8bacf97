"""What may be configured about downloads, and the patience with servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmllm.config import DownloadsTable

HUGGING_FACE = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class DownloadSettings:
    offline: bool = False
    """Nothing is asked of the web."""
    n_lanes: int = 4
    """Pieces of one file that are fetched at the same time."""
    piece_bytes: int = 16 * 2**20
    """What one request asks for, and how often progress is written down."""
    header_step_bytes: int = 2**20
    """A header is read so far at a time, because nobody knows its length before."""
    max_downloads: int = 2
    """At the same time; more wait."""
    endpoint: str = HUGGING_FACE
    token: str = ""
    """For the endpoint's host, and nobody else."""
    max_failures: int = 8
    """In a row without a single byte; then a download fails and keeps what it has."""
    first_pause_s: float = 0.5
    """Before the first repetition; doubles each time."""
    max_pause_s: float = 30.0
    max_retry_after_s: float = 300.0
    """A server that asks for more patience than this is given up."""
    read_timeout_s: float = 60.0
    connect_timeout_s: float = 15.0

    def __repr__(self) -> str:
        return (
            f"<DownloadSettings {self.endpoint} offline={self.offline} token={'yes' if self.token else 'no'}>"
        )


def from_environment(env: Mapping[str, str], table: DownloadsTable) -> DownloadSettings:
    """With Hugging Face's own variables: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE."""
    return DownloadSettings(
        offline=table.offline or env.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        n_lanes=table.connections,
        endpoint=(env.get("HF_ENDPOINT") or HUGGING_FACE).rstrip("/"),
        token=env.get("HF_TOKEN", ""),
    )
