"""Network namespaces with cables to one switch: machines with networks of their own, on this one.

Needs root and `ip`.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000


class NoNamespaces(Exception):
    """This system, or this user, can make none."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextmanager
def cabled_namespaces(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Name -> namespace; the address of the first is 10.87.0.1, and so on. Raises NoNamespaces."""
    prefix = f"swarmllm-{os.getpid()}"
    switch = f"{prefix}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(f"{prefix}-{name}" for name in names)):
            try:
                ip("netns", "add", namespace)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", b"") or str(error).encode()
                raise NoNamespaces(said.decode().strip()) from None
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            namespace, port = f"{prefix}-{name}", f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", namespace, "addr", "add", f"10.87.0.{number}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
        yield {name: f"{prefix}-{name}" for name in names}


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets that this thread opens in the block are of this namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as outside:
        with Path("/run/netns", namespace).open("rb") as there:
            assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(outside.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
