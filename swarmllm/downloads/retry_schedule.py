"""How long to wait before the next attempt, and when to give up."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from swarmllm.downloads.download_errors import Broken, Busy, DownloadError
from swarmllm.downloads.settings import DownloadSettings

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
        """`act` again after each Broken. Raises DownloadError when patience has run out."""
        while True:
            try:
                return await act()
            except Broken as error:
                await self.wait(error)

    async def wait(self, error: Broken) -> None:
        """Raises DownloadError when it has run out."""
        self._n_failures += 1
        settings = self._settings
        if self._n_failures >= settings.max_failures:
            raise DownloadError(f"{error.message}; given up after {self._n_failures} attempts")
        log.info("%s; trying again", error.message)
        self._tell_trouble(error.message)
        pause_s = min(settings.max_pause_s, settings.first_pause_s * 2 ** (self._n_failures - 1))
        # Not all lanes at once.
        pause_s *= random.uniform(0.5, 1.0)
        await trio.sleep(max(pause_s, error.pause_s) if isinstance(error, Busy) else pause_s)
