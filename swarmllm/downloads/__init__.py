"""Models from the web: a Hugging Face repository or an https address becomes a model of this node's store."""

from __future__ import annotations

from swarmllm.downloads.download import Download, DownloadRequest, DownloadView, SharedFileRequest
from swarmllm.downloads.downloads import Downloads
from swarmllm.downloads.header_plan import PublishedModel
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.shared_digests import SharedDigests, WaitingView

__all__ = [
    "Download",
    "DownloadRequest",
    "DownloadSettings",
    "DownloadView",
    "Downloads",
    "PublishedModel",
    "SharedDigests",
    "SharedFileRequest",
    "WaitingView",
]
