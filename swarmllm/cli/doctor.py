"""`swarmllm doctor`: finds problems of this node, and names the remedies.

Every check is a function from facts to findings. The small functions at the end collect the facts, so that a
test can pass those of another machine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.text import Text

from swarmllm.cli.client import EXIT_FAILED, Client, CommandFailed, DaemonUnreachable
from swarmllm.cli.display import kernel_lines, make_console, print_json, safe
from swarmllm.cli.options import api_option, config_option, json_option
from swarmllm.config import Config
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError
from swarmllm.memory_info import memory_bytes
from swarmllm.operating_system import cpu_features, gpu_vendor

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


def check_daemon(stats: dict[str, Any]) -> Iterator[Finding]:
    """What the running daemon says about itself."""
    if not stats["ready"]:
        yield Finding(
            "daemon",
            "warning",
            f"the daemon has not loaded all that it should: {stats.get('reason') or 'not said why'}",
            "see its log",
        )
    for worker in stats["workers"]:
        if n_failures := worker.get("n_failures", 0):
            times = "once" if n_failures == 1 else f"{n_failures} times"
            yield Finding(
                "daemon",
                "warning",
                f"a worker ended by itself {times}; the last time: {worker['last_failure'] or '-'}",
                "see its log; out of memory is the usual reason",
            )
    for line in dict.fromkeys(
        line for worker in stats["workers"] for line in kernel_lines(worker.get("kernels", ()))
    ):
        yield Finding("kernels", "ok", line)
    for said in dict.fromkeys(worker.get("kernel_class", "") for worker in stats["workers"]):
        if said:
            yield Finding(
                "kernels", "ok", f"{said}: exact requests get equal bits from nodes that say the same"
            )
    for task in stats.get("tasks_failed", ()):
        state = {"waiting": "is started again soon", "given up": "was given up"}.get(
            task["state"], "runs again"
        )
        yield Finding(
            "tasks",
            "problem" if task["is_down"] else "warning",
            f"task {task['name']} failed {task['n_failures']} times and {state}; the last error: "
            f"{task['last_error']}; while it is down: {task['meanwhile']}",
            "see the daemon's log for the trace, and report it",
        )
    for model in stats.get("models", ()):
        if model.get("trouble"):
            yield Finding(
                "models",
                "warning",
                f"{model['name']} runs on, but cannot be loaded again: {model['trouble']}",
                "put the file back where it was, or add it from where it is now, before the daemon stops",
            )
    for projector in stats.get("projectors", ()):
        message = f"{projector['name']} takes no pictures here: {projector['cause']}"
        yield Finding("projectors", "warning", message, projector["remedy"])
    loop = stats.get("loop") or {}
    if loop.get("latest_slow_step"):
        yield Finding(
            "event loop",
            "warning",
            f"steps that held up everything else: {loop['slow_steps']}; the last: {loop['latest_slow_step']}",
            "report it with these lines; a share far below 100 % on the CPU means a slow disk or machine",
        )
    yield Finding("daemon", "ok", f"version {stats['version']} runs as process {stats['pid']}")
    yield from _reachability(stats)


def _reachability(stats: dict[str, Any]) -> Iterator[Finding]:
    if not stats["addresses"]:
        yield Finding(
            "reachability",
            "problem",
            "this node has no address that others could dial",
            "remove network.listen_host (then all addresses of this machine count), or set network.announce",
        )
        return
    if not stats["peers_connected"]:
        yield Finding(
            "reachability",
            "warning",
            "no other node is connected",
            "give network.bootstrap an address that `swarmllm status` shows on another node",
        )
    dht = stats.get("dht")
    if dht and dht["mode"] != "off" and stats["peers_connected"] and not dht["n_nodes"]:
        yield Finding(
            "reachability",
            "warning",
            "none of the connected nodes answers in the DHT: a model that none of them has is not found",
            "set network.dht to on at a node that others can dial",
        )
    mapping = stats.get("port_mapping") or {"state": "off", "detail": ""}
    if mapping["state"] == "mapped":
        yield Finding("port mapping", "ok", mapping["detail"])
    elif mapping["state"] == "failed":
        yield Finding(
            "port mapping",
            "warning",
            f"the router does not forward this node's ports: {mapping['detail']}",
            "switch UPnP on in the router, or forward network.libp2p_port and network.data_port there "
            "by hand and set network.announce",
        )
    found = stats.get("reachability")
    if not found:
        return
    has_relay = any("/p2p-circuit" in address for address in stats["addresses"])
    level: Level = "warning" if has_relay else "problem"
    relayed = "reached through a relay, slowly: " if has_relay else ""
    for plane, key in (("control", "network.libp2p_port"), ("data", "network.data_port")):
        tried = found[plane]
        reached = [each["address"] for each in tried if each["reached"]]
        if tried and not reached:
            yield Finding(
                "reachability",
                level,
                f"{relayed}another node could not dial this one's {plane} address {tried[0]['address']}",
                f"open {key} in the firewall, forward it in the router, or set network.announce",
            )
        elif reached:
            yield Finding("reachability", "ok", f"another node dialled {reached[0]}")


# Looking.


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


MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command(
    short_help="Look for what keeps this node from working well.",
    epilog="""\b
Exit codes:
  0 no problem (warnings are none)   1 a problem was found
""",
)
@config_option
@json_option
@api_option
def doctor(config_file: Path | None, as_json: bool, api_url: str) -> None:
    """Look at configuration, ports, clock, memory, disk, libllama and the way to other nodes; say what is
    wrong and what to do. Works with and without a running daemon, and sees more with one."""
    findings = list(examine(config_file, api_url))
    n_problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not n_problems, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        console = make_console()
        for finding in findings:
            mark, style = MARKS[finding.level]
            line = Text.assemble((mark, style), f" {finding.check:<15}", safe(finding.message))
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"  {'':<15}→ {finding.remedy}"), soft_wrap=True)
    if n_problems:
        raise SystemExit(EXIT_FAILED)


def examine(config_file: Path | None, api_url: str) -> Iterator[Finding]:
    try:
        config = load_config(config_file)
    except ConfigError as error:
        yield Finding("configuration", "problem", error.message, "swarmllm config check shows it too")
        config = Config()
    else:
        yield Finding("configuration", "ok", "the configuration can be used")
    stats, finding = ask_daemon(api_url)
    is_running = finding is None or finding.level == "problem"
    if finding is not None:
        yield finding
    yield from check_ports(config, is_running=is_running)
    yield from check_clock(clock_is_synchronised())
    yield from check_memory(*memory_bytes())
    yield from check_open_files(open_files_limit())
    yield from check_disk(config.data_dir)
    yield from check_copies(segment_copies(config))
    yield from check_build(build_info(), cpu_features(), config.resources.n_gpu_layers, gpu_vendor())
    if stats is not None:
        yield from check_daemon(stats)
    if stats is None or not stats["peers_connected"]:
        yield from check_bootstrap(bootstrap_of(config))


def build_info() -> dict[str, Any] | None:
    # Late, as below.
    from swarmllm.workerpool import gpus

    return gpus.build_info()


def bootstrap_of(config: Config) -> tuple[str, ...]:
    # Late, as below.
    from swarmllm.daemon_settings import bootstrap_addresses

    try:
        return bootstrap_addresses(config)
    except ConfigError:
        return config.network.bootstrap  # check_configuration has said it


def segment_copies(config: Config) -> CopiesView:
    # Late: it takes longer to import than most commands take.
    from swarmllm.models.segment_copies import SEGMENTS, SegmentCopies

    return SegmentCopies(config.data_dir / SEGMENTS, config.store.segment_cache_gib).view()


def ask_daemon(api_url: str) -> tuple[dict[str, Any] | None, Finding | None]:
    """What the daemon says; a finding where there is none, or where it does not say."""
    try:
        with Client(api_url) as client:
            return client.get("/api/admin/stats"), None
    except DaemonUnreachable:
        return None, Finding("daemon", "ok", f"no daemon runs at {api_url}")
    except CommandFailed as error:
        return None, Finding(
            "daemon",
            "problem",
            f"the daemon at {api_url} does not tell about itself: {error.message}",
            "a key that may administer it goes into SWARMLLM_KEY; its log says the rest",
        )
