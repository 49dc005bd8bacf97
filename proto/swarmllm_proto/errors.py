"""Errors of decoders for bytes from outside that break the contract.

One root, so that the loop that owns a connection needs one `except`; one class per remedy, because a reader
may close the connection (frames), answer the sender (a bad field), skip the peer (another version) or ask
again (a damaged job). Each names the field, in the sender's words (`sampling.top_p`, `stages[2].end`,
`payload`), and never quotes the content.

Texts of native code for people who did not build it: `/build/llama.cpp/ggml.c:12` becomes `ggml.c:12`.
"""

from __future__ import annotations

import re
from typing import Final


class ProtocolError(Exception):
    """Root. `field` names the offending part, `reason` says what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class FrameTooLarge(ProtocolError):
    """A length above its limit, read or about to be written. `field`: header, payload, record, request or
    response."""


class FrameTruncated(ProtocolError):
    """The bytes ended inside a frame. `field`: the part that is incomplete (header_length, header,
    payload_length, payload)."""


class BadMessage(ProtocolError):
    """A message that is no JSON or MessagePack, or whose `field` is missing, of the wrong type or out of
    range."""


class BadTensor(BadMessage):
    """Tensor bytes that do not follow the format, or an array that the format cannot carry."""


class UnsupportedVersion(BadMessage):
    """The sender speaks another version of the swarm messages; `version` is what it said."""

    def __init__(self, version: int, supported: int) -> None:
        super().__init__("v", f"version {version} is not supported (this node speaks {supported})")
        self.version = version


class DamagedJob(BadMessage):
    """A job message whose digest does not match its bytes. The origin may repeat the step."""

    def __init__(self, request_id: str, position: int) -> None:
        super().__init__("digest", "does not match the header and payload")
        self.request_id = request_id
        self.position = position


_SOURCE: Final = re.compile(r"[^\s:'\"(]*/([\w.+-]+\.(?:c|cc|cpp|cu|cuh|m|h|hpp|inl|py))(?=[:'\",)\s]|$)")


def without_folders(text: str) -> str:
    """The text with every source file named without the folders that it was built in."""
    return _SOURCE.sub(r"\1", text)
