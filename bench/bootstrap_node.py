"""What a bootstrap node pays for each connection and each record.

    python -m bench.bootstrap_node --connections 0 50 100 200 --records 4000

`swarmllm bootstrap` runs in a process of its own, and libp2p hosts that know it alone (one connection each)
in this one. Memory and processor time are the kernel's of the bootstrap node's process: memory when the hosts
have been connected for a while, processor time per second of the clock from then on, while nobody joins. The
records are measured beside it: envelopes of so many nodes, in the book that a node keeps them in, each with
two models and a list of measured ways, as in a swarm that works.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from bench.idle import processor_s
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.membership.identity import Identity, verify
from swarmllm.swarm.records.envelope_book import EnvelopeBook, VerifyOnce
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.envelope import Envelope, seal
from swarmllm_proto.identifiers import ModelId, Multiaddr, NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLink, ShardAnnounce

if TYPE_CHECKING:
    from trio_typing import TaskStatus

JOIN_AT_ONCE = 8
DEADLINE_S = 300.0


def resident_mib(pid: int | str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("no VmRSS")


def somebody() -> Identity:
    keys = create_new_key_pair()
    return Identity(NodeId(str(ID.from_pubkey(keys.public_key))), keys)


def record_of(node_id: NodeId, nickname: str = "somebody") -> bytes:
    others = [NodeId(str(ID(b"\x00\x24\x08\x01\x12\x20" + bytes([n]) * 32))) for n in range(16)]
    models = tuple(
        ShardAnnounce(
            model_id=ModelId(digit * 64),
            name="a model with a name",
            n_layers=80,
            ranges=((0, 20),),
        )
        for digit in "ab"
    )
    links = tuple(ObservedLink(node_id=each, rtt_s=0.02, bytes_per_s=1e7) for each in others)
    capability = NodeCapability(memory_total_bytes=2**36, max_requests=8, observed_links=links)
    return encode_record(
        NodeRecord(node_id=node_id, nickname=nickname, started_at=1e9, models=models, capability=capability)
    )


def memory_of_records(n_records: int) -> tuple[float, float, float]:
    """(bytes of an envelope, KiB resident for each, ms of the processor to take each)"""
    sealed = []
    for _ in range(n_records):
        who = somebody()
        envelope = Envelope(
            node_id=who.node_id,
            started_at_ms=1,
            sequence=1,
            addresses=(Multiaddr("/ip4/192.0.2.1/tcp/8810"),),
            data_addresses=(Multiaddr("/ip4/192.0.2.1/tcp/8811"),),
            record=record_of(who.node_id),
        )
        sealed.append(seal(envelope, who.sign))
    n_bytes = sum(map(len, sealed)) / n_records
    book = EnvelopeBook(somebody().node_id, VerifyOnce(verify))
    gc.collect()
    before, began_s = resident_mib("self"), time.process_time()
    # As they come from the network: each in bytes of its own.
    for each in sealed:
        book.take(bytes(bytearray(each)), 0.0)
    took_s = time.process_time() - began_s
    return n_bytes, (resident_mib("self") - before) * 1024 / n_records, 1000 * took_s / n_records


@contextmanager
def bootstrap_node(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    flags = ["--data-dir", str(folder), "--listen-host", "127.0.0.1", "--no-mdns", "--json"]
    ports = ["--libp2p-port", "0", "--data-port", "0", "--api-port", "0"]
    command = [sys.executable, "-m", "swarmllm", "bootstrap", *flags, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield process.pid, json.loads(process.stdout.readline())
        finally:
            process.terminate()


async def run_host(folder: Path, bootstrap: tuple[str, ...], *, task_status: TaskStatus[None]) -> None:
    settings = SwarmSettings(
        folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, max_peers=1, mdns=False, dht="client", relay=False
    )
    async with open_libp2p_router(settings) as router:
        await router.publish(record_of(router.node_id))
        with trio.fail_after(DEADLINE_S):
            while not router.connected():  # noqa: ASYNC110
                await trio.sleep(0.05)
        task_status.started()
        await trio.sleep_forever()


def scraped(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


async def connections(counts: list[int], settle_s: float, measured_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with bootstrap_node(folder / "bootstrap") as (pid, found):
            url, addresses = found["api_url"], tuple(found["addresses"])
            async with trio.open_nursery() as nursery:
                n_started = 0
                for count in counts:
                    began_s = time.monotonic()
                    while n_started < count:
                        async with trio.open_nursery() as joining:
                            for _ in range(min(JOIN_AT_ONCE, count - n_started)):
                                host = folder / str(n_started)
                                host.mkdir()
                                joining.start_soon(nursery.start, run_host, host, addresses)
                                n_started += 1
                    joined_s = time.monotonic() - began_s
                    await trio.sleep(settle_s)
                    start_s, before = time.monotonic(), processor_s(pid)
                    await trio.sleep(measured_s)
                    spent = (processor_s(pid) - before) / (time.monotonic() - start_s)
                    n_there = await trio.to_thread.run_sync(scraped, url, "swarmllm_connections")
                    n_known = await trio.to_thread.run_sync(scraped, url, "swarmllm_nodes_known")
                    n_files = await trio.to_thread.run_sync(scraped, url, "process_open_fds")
                    print(
                        f"| {n_there:.0f} | {n_known:.0f} | {resident_mib(pid):.1f} | {100 * spent:.2f} | "
                        f"{n_files:.0f} | {joined_s:.1f} |",
                        flush=True,
                    )
                nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, nargs="*", default=[0, 50, 100, 200])
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--settle", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    if arguments.records:
        n_bytes, kib, took_ms = memory_of_records(arguments.records)
        print(
            f"a record of {n_bytes:.0f} bytes: {kib:.2f} KiB resident, {took_ms:.3f} ms to take\n", flush=True
        )
    print("| connections | nodes known | MiB | % of a core | open files | s to join |")
    print("|---|---|---|---|---|---|")
    trio.run(connections, sorted(arguments.connections), arguments.settle, arguments.seconds)


if __name__ == "__main__":
    main()
