"""Models from the web: a Hugging Face repository or an https address becomes a model of this node's store."""

from __future__ import annotations

from swarmllm.downloads.book import Download, Downloads, DownloadView
from swarmllm.downloads.gathering import Gathering, WaitingView
from swarmllm.downloads.settings import DownloadSettings

__all__ = ["Download", "DownloadSettings", "DownloadView", "Downloads", "Gathering", "WaitingView"]
