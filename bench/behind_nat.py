"""Two nodes behind routers of their own, and one that both can reach: they meet through it, then directly.

    sudo python -m bench.behind_nat [--out bench/results/behind_nat.json]

Real network namespaces: two home networks whose routers masquerade and let in answers only (nftables), joined
by a network in which the relay is. Measured from the second node: how long until it is connected with the
first, and the round trip of 14 KB (a hidden state) through the relay, then directly if a hole can be punched.
The rival in the same run is the same line without any relay: both nodes in the network in the middle.

Needs root, `ip` and `nft`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio

from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings

PAYLOAD = bytes(14 * 1024)
N_ROUND_TRIPS = 300
MEET_S = 60.0
PUNCH_S = 40.0
RULES = """
table ip home {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
  chain through { type filter hook forward priority 0; policy drop;
    iifname "lan" accept; ct state established,related accept; }
  chain in { type filter hook input priority 0; policy accept; iifname "wan" ct state new drop; }
}
"""


def sh(command: str, **how: Any) -> None:
    subprocess.run(command.split(), check=True, **how)


@contextmanager
def namespaces() -> Iterator[None]:
    names = ("relay", "router_a", "router_b", "home_a", "home_b", "middle", "plain_a", "plain_b")
    try:
        for name in names:
            sh(f"ip netns add nat_{name}")
            sh(f"ip -n nat_{name} link set lo up")
        sh("ip -n nat_middle link add bridge type bridge")
        sh("ip -n nat_middle link set bridge up")
        for n, name in enumerate(("relay", "router_a", "router_b", "plain_a", "plain_b"), start=1):
            sh(f"ip -n nat_middle link add port{n} type veth peer name wan netns nat_{name}")
            sh(f"ip -n nat_middle link set port{n} master bridge up")
            sh(f"ip -n nat_{name} addr add 198.51.100.{n}/24 dev wan")
            sh(f"ip -n nat_{name} link set wan up")
        for n, side in enumerate("ab", start=1):
            sh(f"ip -n nat_router_{side} link add lan type veth peer name eth netns nat_home_{side}")
            sh(f"ip -n nat_router_{side} addr add 192.168.{n}.1/24 dev lan")
            sh(f"ip -n nat_router_{side} link set lan up")
            sh(f"ip -n nat_home_{side} addr add 192.168.{n}.2/24 dev eth")
            sh(f"ip -n nat_home_{side} link set eth up")
            sh(f"ip -n nat_home_{side} route add default via 192.168.{n}.1")
            sh(f"ip netns exec nat_router_{side} sysctl -qw net.ipv4.ip_forward=1")
            sh(f"ip netns exec nat_router_{side} nft -f -", input=RULES.encode())
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", f"nat_{name}"], check=False, capture_output=True)


@contextmanager
def node(namespace: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", f"nat_{namespace}", sys.executable, "-m", "bench.behind_nat", "node"]
    process = subprocess.Popen([*command, str(folder), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline() or "{}"))


def measure(homes: tuple[str, str], *, punches: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        relay = stack.enter_context(node("relay", Path(folder) / "r", "--relays"))
        bootstrap = ["--bootstrap", said(relay)["address"], *(["--punches"] if punches else [])]
        first = stack.enter_context(node(homes[0], Path(folder) / "a", *bootstrap))
        target = said(first)["node_id"]
        second = stack.enter_context(node(homes[1], Path(folder) / "b", *bootstrap, "--ask", target))
        said(second)
        return said(second)


async def run_node(arguments: argparse.Namespace) -> None:
    arguments.folder.mkdir(exist_ok=True)
    settings = SwarmSettings(
        arguments.folder,
        bootstrap=tuple(arguments.bootstrap),
        mdns=False,
        relay_service=arguments.relays,
        hole_punching=arguments.punches,
    )
    came = trio.Event()

    async def take(sender: str, header: bytes, payload: memoryview) -> None:
        nonlocal came
        if header == b"ask":
            nursery.start_soon(router.send, sender, b"answer", bytes(payload))
        came.set()
        came = trio.Event()

    async def refuse(sender: str, body: bytes) -> bytes:
        raise ValueError

    async with open_libp2p_router(settings) as router, trio.open_nursery() as nursery:
        router.serve(refuse, take)
        address = next(text for text in router.addresses if "127.0.0.1" not in text)
        print(json.dumps({"node_id": router.node_id, "address": address}), flush=True)
        if not arguments.ask:
            await trio.sleep_forever()
        began_s = trio.current_time()
        result: dict[str, Any] = {}
        with trio.move_on_after(MEET_S):
            while arguments.ask not in router.connected():  # noqa: ASYNC110
                await trio.sleep(0.01)

            async def ask() -> float:
                asked_at_s = trio.current_time()
                changes = came
                await router.send(arguments.ask, b"ask", PAYLOAD)
                await changes.wait()
                return (trio.current_time() - asked_at_s) * 1000

            result["connected_after_s"] = round(trio.current_time() - began_s, 1)
            if arguments.punches:
                with trio.move_on_after(PUNCH_S):
                    while way(router, arguments.ask) != "direct TCP":  # noqa: ASYNC110
                        await trio.sleep(0.02)
                    result["direct_after_s"] = round(trio.current_time() - began_s, 1)
            result |= await round_trips(router, arguments.ask, ask)
        print(json.dumps(result), flush=True)
        await trio.sleep_forever()


def way(router: Libp2pRouter, node_id: str) -> str:
    """How messages to a node go now."""
    kind = router.plane.status(node_id).kind
    return {"direct": "direct TCP", "libp2p": "direct libp2p stream"}.get(kind, kind)


async def round_trips(router: Libp2pRouter, node_id: str, ask: Any) -> dict[str, Any]:
    times_ms = sorted([await ask() for _ in range(N_ROUND_TRIPS)][20:])
    return {
        "way": way(router, node_id),
        "p50_ms": round(statistics.median(times_ms), 2),
        "p99_ms": round(times_ms[int(0.99 * len(times_ms))], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command")
    child = commands.add_parser("node")
    child.add_argument("folder", type=Path)
    child.add_argument("--bootstrap", action="append", default=[])
    child.add_argument("--relays", action="store_true")
    child.add_argument("--punches", action="store_true")
    child.add_argument("--ask", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "node":
        trio.run(run_node, arguments)
        return
    with namespaces():
        results = {
            "relay only": measure(("home_a", "home_b"), punches=False),
            "relay, then a hole": measure(("home_a", "home_b"), punches=True),
            "no routers (rival)": measure(("plain_a", "plain_b"), punches=False),
        }
    text = json.dumps({"n_cores": os.cpu_count(), "payload_bytes": len(PAYLOAD), "ways": results}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
