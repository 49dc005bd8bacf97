"""What can be wrong with this machine and the configuration, for `swarmllm doctor`.

Every check is a function from facts to findings. The small functions at the end collect the facts, so that a
test can pass those of another machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swarmllm.config import Config

if TYPE_CHECKING:
    from swarmllm.models.segment_copies import CopiesView

Level = Literal["ok", "warning", "problem"]

GIB = 2**30
LOW_MEMORY_BYTES = 1 * GIB
LOW_DISK_BYTES = 2 * GIB
MIN_OPEN_FILES = 4096
CONNECT_TIMEOUT_S = 3.0
STA_UNSYNC = 0x0040
"""linux/timex.h: nobody keeps the clock right."""
GPU_BUILDS = {"NVIDIA": "-DGGML_CUDA=on", "AMD": "-DGGML_HIP=on"}
CPU_FEATURES = {
    "avx": "AVX",
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx512f": "AVX512",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
}
"""As /proc/cpuinfo and as libllama call them."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    message: str
    remedy: str = ""


def check_ports(config: Config, is_running: bool) -> Iterator[Finding]:
    """Without a daemon: whether the ports could be had."""
    from swarmllm.swarm.discovery.addresses import ips_to_listen_on

    wanted = (
        ("api.port", config.api.host, config.api.port),
        ("network.libp2p_port", config.network.listen_host, config.network.libp2p_port),
        ("network.data_port", config.network.listen_host, config.network.data_port),
    )
    for key, host, port in wanted:
        if is_running or port == 0:
            continue
        if failure := next(filter(None, (bind_failure(ip, port) for ip in ips_to_listen_on(host))), ""):
            yield Finding(
                "ports",
                "problem",
                f"port {port} ({key}) on {host} cannot be had: {failure}",
                f"stop what uses it (ss -ltnp 'sport = :{port}'), or choose another {key}",
            )
        else:
            yield Finding("ports", "ok", f"port {port} ({key}) is free")
    if is_running:
        yield Finding("ports", "ok", "the daemon has its ports")


def check_clock(is_synchronised: bool | None) -> Iterator[Finding]:
    if is_synchronised is False:
        yield Finding(
            "clock",
            "warning",
            "nothing keeps this machine's clock right",
            "let something do it: timedatectl set-ntp true",
        )
    else:
        yield Finding(
            "clock", "ok", "the clock is kept right" if is_synchronised else "the kernel does not say"
        )


def check_memory(total_bytes: int, available_bytes: int) -> Iterator[Finding]:
    text = f"{_gib(available_bytes)} of {_gib(total_bytes)} memory are free"
    if not total_bytes:
        yield Finding("memory", "warning", "how much memory there is cannot be seen here")
    elif available_bytes < LOW_MEMORY_BYTES:
        yield Finding("memory", "problem", text, "close other programs, or unload a model")
    else:
        yield Finding("memory", "ok", text)


def check_open_files(limit: int) -> Iterator[Finding]:
    if limit < MIN_OPEN_FILES:
        yield Finding(
            "limits",
            "warning",
            f"a process of this user may have {limit} files open at most; many connections need more",
            f"ulimit -Hn {MIN_OPEN_FILES} before the daemon starts, or LimitNOFILE in its unit",
        )
    else:
        yield Finding("limits", "ok", f"{limit} files may be open")


def check_copies(copies: CopiesView) -> Iterator[Finding]:
    text = f"copies of layers take {_gib(copies.n_bytes)}"
    if copies.quota_bytes:
        text += f" of at most {_gib(copies.quota_bytes)} (store.segment_cache_gib)"
    if copies.quota_bytes and copies.n_bytes > copies.quota_bytes:
        yield Finding(
            "disk",
            "warning",
            f"{text}; what is in use stays",
            "unload layers, or set store.segment_cache_gib to more",
        )
    elif copies.n_files:
        yield Finding("disk", "ok", text)


def check_disk(data_dir: Path) -> Iterator[Finding]:
    folder = data_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "disk", "problem", f"{folder} cannot be written to", "set node.data_dir, or change its owner"
        )
        return
    if data_dir.exists() and data_dir.stat().st_mode & 0o077:
        yield Finding(
            "disk",
            "warning",
            f"others on this machine may look into {data_dir}, where the node's key lies",
            f"chmod 700 {data_dir}",
        )
    free_bytes = shutil.disk_usage(folder).free
    text = f"{_gib(free_bytes)} are free for models in {folder}"
    if free_bytes < LOW_DISK_BYTES:
        yield Finding("disk", "problem", text, "make room, or set node.data_dir to another disk")
    else:
        yield Finding("disk", "ok", text)


def check_build(
    info: dict[str, Any] | None,
    cpu_features: frozenset[str],
    n_gpu_layers: int | str,
    vendor: str | None = None,
) -> Iterator[Finding]:
    """`vendor`: of a GPU whose driver is there (see `gpu_vendor`)."""
    if info is None:
        yield Finding(
            "libllama",
            "problem",
            "libllama cannot be loaded",
            "install it anew: pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python",
        )
        return
    built = set(info["features"])
    unused = [theirs for ours, theirs in CPU_FEATURES.items() if ours in cpu_features and theirs not in built]
    if unused:
        yield Finding(
            "libllama",
            "warning",
            f"libllama does not use {', '.join(unused)} of this processor",
            "build it here: CMAKE_ARGS=-DGGML_NATIVE=on pip install --force-reinstall --no-binary "
            "llama-cpp-python llama-cpp-python",
        )
    yield from check_gpus(info, n_gpu_layers, vendor)
    for shortcoming in info.get("shortcomings", ()):
        remedy = "install a C compiler, then swarmllm again" if "part" in shortcoming.split() else ""
        yield Finding("libllama", "warning", shortcoming, remedy)
    used = ", ".join(info["features"]) or "no extensions of the processor"
    variant = info.get("cpu_variant")
    build = f"portable build, variant {variant}" if variant else "built for one kind of processor"
    has_gpu = ", GPU" if info["gpu"] else ""
    yield Finding("libllama", "ok", f"llama-cpp-python {info['version']} ({build}): {used}{has_gpu}")


def check_gpus(info: dict[str, Any], n_gpu_layers: int | str, vendor: str | None) -> Iterator[Finding]:
    flags = GPU_BUILDS.get(vendor or "", "-DGGML_CUDA=on")
    build = f"CMAKE_ARGS={flags} pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
    if not info["gpu"]:
        if n_gpu_layers not in (0, "auto"):
            text = f"resources.n_gpu_layers is {n_gpu_layers}, but libllama was built without a GPU"
            yield Finding("gpu", "problem", text, f"build it with one: {build}")
        elif vendor is not None:
            text = f"there is a driver for GPUs of {vendor}, but libllama was built without one"
            yield Finding("gpu", "warning", text, f"build it with one: {build}")
        return
    for gpu in info.get("gpus", ()):
        free = f"{_gib(gpu['free_bytes'])} of {_gib(gpu['total_bytes'])} free"
        where = "" if gpu["has_own_memory"] else ", of the machine's memory"
        chosen = f"resources.n_gpu_layers is {n_gpu_layers}"
        yield Finding("gpu", "ok", f"{gpu['name']} {gpu['description']}: {free}{where}; {chosen}")
    if not info.get("gpus"):
        text = "libllama was built for a GPU and sees none"
        yield Finding("gpu", "warning", text, "look at the driver: nvidia-smi, rocm-smi or vulkaninfo")


def check_bootstrap(addresses: Iterable[str]) -> Iterator[Finding]:
    for address in addresses:
        host, port = tcp_of(address)
        if not port:
            continue
        if failure := connect_failure(host, port):
            yield Finding(
                "reachability",
                "problem",
                f"{host} port {port} (network.bootstrap) does not answer: {failure}",
                "start the node there, open the port in its firewall, or correct the address",
            )
        else:
            yield Finding("reachability", "ok", f"{host} port {port} (network.bootstrap) answers")


def bind_failure(host: str, port: int) -> str:
    """Why a port cannot be had; empty where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("127.0.0.1" if host == "localhost" else host, port))
        except OSError as error:
            return (
                "something else uses it" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            )
    return ""


def connect_failure(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def tcp_of(multiaddr: str) -> tuple[str, int]:
    """Host and port of /ip4/1.2.3.4/tcp/8810/p2p/ID; port 0 where it has none."""
    parts = multiaddr.strip("/").split("/")
    fields = dict(zip(parts[::2], parts[1::2], strict=False))
    host = next((fields[kind] for kind in ("ip4", "ip6", "dns", "dns4", "dns6") if kind in fields), "")
    port = fields.get("tcp", "")
    return (host, int(port)) if host and port.isascii() and port.isdigit() and int(port) < 65536 else ("", 0)


def clock_is_synchronised() -> bool | None:
    """As the kernel knows it; None where it does not say."""
    size = 512  # struct timex is some 200 bytes; only its second field is read
    buffer = ctypes.create_string_buffer(size)
    try:
        result = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if result < 0:
        return None
    # int modes; long offset, freq, maxerror, esterror; int status
    status = ctypes.c_int.from_buffer(buffer, 5 * ctypes.sizeof(ctypes.c_long)).value
    return not status & STA_UNSYNC


def open_files_limit() -> int:
    """What a daemon may raise its own to, as it does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard if hard != resource.RLIM_INFINITY else 2**31


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB"
