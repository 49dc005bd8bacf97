"""A node in a process of its own, for tests that kill or freeze it.

    python node_process.py DATA_DIR [BOOTSTRAP ...]

Writes its first address as a line, then echoes: a request gets its body back, a message goes back to its
sender. It says that it holds a model. Ends with its standard input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

MODEL_ID, N_LAYERS = "5" * 64, 4


def record(node_id: str) -> bytes:
    held = ShardAnnounce(model_id=MODEL_ID, name="m", n_layers=N_LAYERS, ranges=((0, N_LAYERS),))
    return encode_record(NodeRecord(node_id=node_id, models=(held,)))


async def main(data_dir: Path, bootstrap: tuple[str, ...]) -> None:
    settings = SwarmSettings(data_dir, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False)
    async with open_libp2p_router(settings) as router:

        async def echo_request(sender: str, body: bytes) -> bytes:
            return body

        async def echo_message(sender: str, header: bytes, payload: memoryview) -> None:
            await router.send(sender, header, payload)

        router.serve(echo_request, echo_message)
        await router.publish(record(router.node_id))
        print(router.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)  # type: ignore[call-arg]


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), tuple(sys.argv[2:]))
