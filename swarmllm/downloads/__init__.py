"""Models from the web: a Hugging Face repository or an https address becomes a model of this node's store."""

from __future__ import annotations

from swarmllm.downloads.downloads import Download, Downloads, DownloadView
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.shared_digests import SharedDigests, WaitingView

__all__ = ["Download", "DownloadSettings", "DownloadView", "Downloads", "SharedDigests", "WaitingView"]
