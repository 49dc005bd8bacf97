"""What a running daemon says that is wrong with it, for `swarmllm doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swarmllm.cli.display import kernel_lines
from swarmllm.cli.machine_checks import Finding, Level


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
