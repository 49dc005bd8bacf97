"""The projector (mmproj) that a repository of a hub has beside a model: its header is looked at before the
model is fetched, its file is fetched after it.

A repository without one, or with one that cannot be used here, costs a listing and a header.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import trio

from swarmllm.downloads.header_plan import read_start
from swarmllm.downloads.published_files import repository_file
from swarmllm.downloads.remote import Remote, RemoteFileInfo
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import choose_projector, file_url, listed_files, listing_url
from swarmllm.downloads.whole_file import WholeFile
from swarmllm.errors import BadModel
from swarmllm.models.manifest import Manifest
from swarmllm.models.projector import parse_projector, require_header_fits

log = logging.getLogger(__name__)

MAX_FAILURES: Final = 3
"""Without it, the model comes all the same."""


@dataclass(frozen=True, slots=True)
class HubProjector:
    file: str
    """Its name in the repository."""
    remote: Remote
    facts: RemoteFileInfo
    family: str
    n_embd: int
    problem: str
    """Why it cannot be used here; empty: it can, as far as its header tells."""

    def require_fit(self, manifest: Manifest) -> None:
        """That a model can use it, as far as its header tells. Raises BadModel."""
        if self.problem:
            raise BadModel(self.problem, field="mmproj")
        require_header_fits(self.file, self.family, self.n_embd, manifest)

    async def fetch(
        self,
        folder: Path,
        settings: DownloadSettings,
        retries: RetrySchedule,
        progress: Callable[[int, int], None],
    ) -> WholeFile:
        """Into `folder`; what has come of it earlier is not fetched again. Raises DownloadError,
        StoreFull."""
        whole = WholeFile(self.remote, folder, settings, retries, progress)
        await whole.run(self.facts, "", lambda: None)
        return whole


async def find_projector(
    model_url: str, settings: DownloadSettings, http: httpx.AsyncClient
) -> HubProjector | None:
    """What the repository of a model's file has; None: nothing, or the file is in none. Raises
    DownloadError."""
    found = repository_file(model_url, settings.endpoint)
    if found is None:
        return None
    repo, model_file = found
    settings = replace(settings, max_failures=min(settings.max_failures, MAX_FAILURES))
    retries = RetrySchedule(settings)
    url = listing_url(settings.endpoint, repo)
    raw = await retries.keep_trying(Remote(http, url, settings.token, settings).listing)
    file = choose_projector(listed_files(raw, url), model_file)
    if not file:
        return None
    remote = Remote(http, file_url(settings.endpoint, repo, file), settings.token, settings)
    return await retries.keep_trying(partial(_looked_at, file, remote, settings.header_step_bytes))


async def _looked_at(file: str, remote: Remote, step_bytes: int) -> HubProjector:
    facts = await remote.facts()
    try:
        _, header = await read_start(remote, facts, step_bytes)
        family, n_embd = await trio.to_thread.run_sync(parse_projector, header)
    except BadModel as error:
        return HubProjector(file, remote, facts, "", 0, f"{file}: {error.message}")
    return HubProjector(file, remote, facts, family, n_embd, "")
