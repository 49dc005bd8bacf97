"""What can go wrong between this node and a web server."""

from __future__ import annotations

from swarmllm.errors import SwarmLLMError


class DownloadError(SwarmLLMError):
    """A download failed; what has arrived is kept, and asking again continues."""

    http_status = 502
    error_type = "upstream_error"
    code = "download_failed"


class Refused(DownloadError):
    """The server will not give it, now or on another attempt."""


class FileChanged(DownloadError):
    """The file is not the one that was begun."""


class Broken(DownloadError):
    """The connection or the answer broke; another attempt may not."""


class Busy(Broken):
    """The server asks for patience."""

    def __init__(self, message: str, pause_s: float) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Offline(DownloadError):
    http_status = 409
    error_type = "invalid_request_error"
    code = "offline"
