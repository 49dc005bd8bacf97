"""Settings of downloads, and the schedule of retries."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import trio

from swarmllm.config import DownloadsTable
from swarmllm.downloads.source import ConnectionBroken, DownloadError, ServerBusy

log = logging.getLogger(__name__)

T = TypeVar("T")


class RetrySchedule:
    """Shared by everything that asks one server for one file."""

    def __init__(
        self, settings: DownloadSettings, tell_trouble: Callable[[str], None] = lambda trouble: None
    ) -> None:
        """`tell_trouble`: hears what has gone wrong whenever it is going to be tried again."""
        self._settings = settings
        self._tell_trouble = tell_trouble
        self._n_failures = 0

    def progress(self) -> None:
        self._n_failures = 0

    async def keep_trying(self, act: Callable[[], Awaitable[T]]) -> T:
        """`act` again after each Broken. Raises DownloadError when its time has run out."""
        while True:
            try:
                return await act()
            except ConnectionBroken as error:
                await self.wait(error)

    async def wait(self, error: ConnectionBroken) -> None:
        """Raises DownloadError when it has run out."""
        self._n_failures += 1
        settings = self._settings
        if self._n_failures >= settings.max_failures:
            raise DownloadError(f"{error.message}; given up after {self._n_failures} attempts")
        log.info("download tries again: %s", error.message)
        self._tell_trouble(error.message)
        pause_s = min(settings.max_pause_s, settings.first_pause_s * 2 ** (self._n_failures - 1))
        # Not all lanes at once.
        pause_s *= random.uniform(0.5, 1.0)
        await trio.sleep(max(pause_s, error.pause_s) if isinstance(error, ServerBusy) else pause_s)


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
    """A server that asks for a longer pause than this is given up."""
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
