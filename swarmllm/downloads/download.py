"""One download: its request, its progress, and its end."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import trio

from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import DownloadSource
from swarmllm.downloads.unidentified_model import UnidentifiedModel
from swarmllm.downloads.whole_file import WholeFile
from swarmllm.models import CatalogueEntry
from swarmllm_proto.identifiers import NOT_PUBLISHED, PublishedName

RATE_WINDOW_S = 5.0

DownloadState = Literal["waiting", "fetching", "checking", "done", "failed", "cancelled"]
ENDED: frozenset[DownloadState] = frozenset({"done", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class SharedFileRequest:
    """Some layers of a file that another node, or this one, asks several nodes to fetch."""

    header: str
    """BLAKE3 of the file up to its first tensor; nothing more is fetched of a file with another one."""
    size_bytes: int
    sha256: str
    """Of the whole file, as all who fetch some of it are told; empty: nobody says it."""
    allow: Callable[[int], None]
    """Called with the bytes that are missing, before they are fetched; raises SwarmLLMError where there is no
    room for them."""
    is_own: bool
    """This node's user asks; else the node's token is not used."""


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """The request of a caller, with everything needed to repeat it."""

    source: str
    _: KW_ONLY
    layers: str | None = None
    name: str | None = None
    sha256: str = ""
    token: str | None = field(default=None, repr=False)
    endpoint: str | None = None
    """`token` and `endpoint` are those of the caller, instead of the node's own: the node's token never goes
    to an endpoint that somebody else names."""
    shared: SharedFileRequest | None = None
    mmproj: bool = True
    """Whether the projector of the same repository comes, too, and is attached to the model."""
    then: Callable[[CatalogueEntry, PublishedName], Awaitable[object]] | None = None
    """What is done with the model, and where its file is published, before it counts as done."""


@dataclass(frozen=True, slots=True)
class DownloadView:
    id: str
    source: str
    layers: str | None
    state: DownloadState
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    model: str
    """The name of the model that it became, or will become."""
    published: PublishedName
    """The file of a repository that was meant; empty: it is none, or not known."""
    projector: str
    """The file of the same repository that comes after the model, and is attached to it; empty: none."""
    projector_bytes: int
    """Of that file; `total_bytes` counts them."""
    waits_for: str
    """What the swarm does not know yet: until then it is no model."""
    trouble: str
    """Why it does not get on, while it is tried again."""
    error: str
    """Why it failed; of one that is done, why what should be done with the model then was not."""


class Download:
    """One download; `ended` is set when nothing more will happen."""

    def __init__(self, source: DownloadSource, request: DownloadRequest) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.source = source
        self.request = request
        self.layers = request.layers
        self.name = request.name or ""
        self.sha256 = request.sha256.lower()
        self.whole: WholeFile | None = None
        """What has arrived of a whole file, once it is known which one that is."""
        self.unidentified: UnidentifiedModel | None = None
        """What has arrived of some layers, while nobody knows of which model."""
        self.state: DownloadState = "waiting"
        self.model = ""
        self.published = NOT_PUBLISHED
        self.projector = ""
        self.projector_bytes = 0
        self.projector_trouble = ""
        self.waits_for: Callable[[], str] = lambda: ""
        self.trouble = ""
        self.error = ""
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.done_bytes = self.total_bytes = 0
        self._history: deque[tuple[float, int]] = deque()

    def retries(self, settings: DownloadSettings) -> RetrySchedule:
        """For one thing that a server is asked for; what it meets is this download's trouble."""
        return RetrySchedule(settings, self._meet)

    def _meet(self, trouble: str) -> None:
        self.trouble = trouble

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if done_bytes != self.done_bytes:
            self.trouble = ""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes + self.projector_bytes
        if not self._history or now_s - self._history[-1][0] > RATE_WINDOW_S / 20:
            self._history.append((now_s, done_bytes))
        while now_s - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()

    def projector_progress(self, done_bytes: int, total_bytes: int) -> None:
        """Of the projector, when the model is here."""
        model_bytes = self.total_bytes - self.projector_bytes
        self.progress(model_bytes + done_bytes, model_bytes)

    def has_no_projector(self, trouble: str = "") -> None:
        """None comes after all, and why."""
        self.total_bytes -= self.projector_bytes
        self.projector, self.projector_bytes, self.projector_trouble = "", 0, trouble

    def has_failed(self, error: Exception) -> None:
        """By what nobody expected."""
        self.state, self.error = "failed", f"internal error ({type(error).__name__}); see the node's log"
        self.ended.set()

    def view(self) -> DownloadView:
        rate = 0.0
        if self.state == "fetching" and len(self._history) > 1:
            (since_s, before), (now_s, now) = self._history[0], self._history[-1]
            rate = max(0.0, (now - before) / (now_s - since_s))
        return DownloadView(
            id=self.id,
            source=self.source.text,
            layers=self.layers,
            state=self.state,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            bytes_per_s=rate,
            model=self.model,
            published=self.published,
            projector=self.projector,
            projector_bytes=self.projector_bytes,
            waits_for=self.waits_for(),
            trouble="" if self.state in ENDED else self.trouble,
            error=self.error,
        )
