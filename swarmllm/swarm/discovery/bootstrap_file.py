"""Reads a bootstrap file: one multiaddr with /p2p/ID in each line, as a swarm may publish it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.swarm.discovery.addresses import NodeAddress

FIELD: Final = "network.bootstrap_file"
ADDRESSES_MAX: Final = 256
"""Each is resolved, and dialled while it is not connected."""
FILE_MAX: Final = 256 * 1024
"""Bytes: four times what so many of the longest addresses take."""


def read_bootstrap_file(file: Path) -> tuple[str, ...]:
    """The addresses, without repetitions. Lines that begin with # are comments. Blocking.

    Raises ConfigError naming the file and the line.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {file}: {error.strerror}.", field=FIELD) from None
    if len(content) > FILE_MAX:
        raise ConfigError(f"{FIELD}: {file} has more than {FILE_MAX // 1024} KiB.", field=FIELD)
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{FIELD}: {file} is not UTF-8 text.", field=FIELD) from None
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            NodeAddress.parse(text, field=FIELD)
        except InvalidRequest as error:
            raise ConfigError(f"{FIELD}: {file}, line {number}: {error.message}", field=FIELD) from None
        found[text] = None
        if len(found) > ADDRESSES_MAX:
            raise ConfigError(f"{FIELD}: {file} has more than {ADDRESSES_MAX} addresses.", field=FIELD)
    return tuple(found)
