"""What strangers can make a node keep: `python -m bench.strangers`.

One peer and then 64 peers fill each row of the byte budget with real bytes, and after it recent gossip and
the entries of the DHT. Prints for each number of peers the bytes of the budget in use, the budget,
and the memory of the process before and after. Each number of peers has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from libp2p.pubsub.pb import rpc_pb2

from bench.common.figures import RESULTS, machine
from swarmllm.swarm.byte_budget import LIMITS, TOTAL_MIB, ByteBudget
from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm.swarm.discovery.dht.table import KEYS_PER_NODE, ProviderBook
from swarmllm.swarm.libp2p.gossip_mesh import RECENT_MAX_BYTES, ContentCache
from swarmllm_proto.limits import MIB

PEERS = (1, 64)
PIECE_BYTES = 64 * 1024
GOSSIP_BYTES = 64 * 1024
ADDRESSES = tuple(f"/ip4/10.0.0.1/tcp/{port}" + "/x" * 80 for port in range(8))


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS")


def fill_budget(n_peers: int, kept: list[Any]) -> ByteBudget:
    """Each peer takes what it gets of each kind, and the bytes are there."""
    budget = ByteBudget()
    for kind in LIMITS:
        for peer in range(n_peers):
            while (grant := budget.reserve(f"peer{peer}", kind, PIECE_BYTES)) is not None:
                kept.append((grant, np.ones(PIECE_BYTES, np.uint8)))
    return budget


def fill_others(n_peers: int, kept: list[Any]) -> None:
    recent = ContentCache(3, 5, SimpleNamespace(get_message_id=lambda each: each.data[:8]))
    for number in range(2 * RECENT_MAX_BYTES // GOSSIP_BYTES):
        data = number.to_bytes(8, "little") + bytes(GOSSIP_BYTES)
        recent.put(rpc_pb2.Message(data=data, topicIDs=["t"]))
    book = ProviderBook()
    for peer in range(n_peers):
        for key in range(KEYS_PER_NODE):
            contact = Contact(
                cast("Any", f"peer{peer}"), cast("Any", tuple(each + str(key) for each in ADDRESSES))
            )
            book.add(key.to_bytes(34, "little"), contact, 0.0)
    kept += [recent, book]


def measure(n_peers: int) -> dict[str, float]:
    kept: list[Any] = []
    gc.collect()
    before = resident_bytes()
    budget = fill_budget(n_peers, kept)
    with_budget = resident_bytes()
    fill_others(n_peers, kept)
    after = resident_bytes()
    return {
        "peers": n_peers,
        "budget_mib": TOTAL_MIB,
        "reserved_mib": round(budget.n_bytes / MIB, 1),
        "resident_before_mib": round(before / MIB, 1),
        "resident_with_budget_mib": round(with_budget / MIB, 1),
        "resident_after_mib": round(after / MIB, 1),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.map(measure, PEERS, chunksize=1)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    found = {"machine": machine(), "rows": rows}
    (RESULTS / "strangers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
