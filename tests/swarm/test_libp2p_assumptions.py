"""What this project assumes of py-libp2p beyond its documentation: private names, and names that it replaces.

Whether a guard works is tested beside it. Here each name is looked for in the library's source, so that after
a change of the pinned version a sentence says which code of ours no longer works.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import libp2p
import pytest

LIBRARY = Path(libp2p.__file__).parent
OURS = Path(__file__).resolve().parents[2] / "swarmllm" / "swarm"

YAMUX = "stream_muxer/yamux/yamux.py"
PUBSUB, GOSSIPSUB = "pubsub/pubsub.py", "pubsub/gossipsub.py"
SWARM, HOST = "network/swarm.py", "host/basic_host.py"
MANAGER = "tools/anyio_service/trio_manager.py"

PRIVATE = {
    "_py_yamux_env": (YAMUX, "fast_paths finds no function that asks the environment for settings"),
    "_state_lock": (
        "network/stream/net_stream.py",
        "each read and write of a stream gives others a turn first",
    ),
    "_state": ("network/stream/net_stream.py", "fast_paths reads from streams that were reset"),
    "_drain": ("security/secure_session.py", "fast_paths loses what came before yamux began to read"),
    "_get_peers_to_send": (GOSSIPSUB, "gossip that waits is passed on to nobody"),
    "_maintain_mesh_quality": (GOSSIPSUB, "a neighbour in the mesh is replaced at each look"),
    "_perform_opportunistic_grafting": (GOSSIPSUB, "neighbours are added to the mesh at each look"),
    "_read_data_body": (YAMUX, "BoundedYamux no longer bounds a frame before it is read"),
    "_nursery": (YAMUX, "BoundedYamux.end ends no connection any more"),
    "_write_frame": (YAMUX, "ControlKeepalive sends no pings, and fast_paths holds no opening frames back"),
    "_ping_id": (YAMUX, "ControlKeepalive numbers its pings apart from the library's"),
    "_ping_sent_time": (YAMUX, "round trips are measured from the wrong ping"),
    "_write_lock": (YAMUX, "fast_paths takes a lock that the library does not"),
    "_auto_tune_and_send_window_update": (YAMUX, "guards.batch_window_updates batches nothing"),
    "_grow_threshold": (YAMUX, "guards.batch_window_updates does not know half of a window"),
    "_selector": (
        "security/security_multistream.py",
        "negotiation.propose_at_once waits for the answer to each proposal of a new connection",
    ),
    "_set_reuse_flags": ("transport/tcp/tcp.py", "guards.listen_on_one_family has no effect"),
    "_run_and_manage_task": (MANAGER, "guards.find_parents_of_tasks_at_once remembers no task"),
    "_find_parent_task": (MANAGER, "guards.find_parents_of_tasks_at_once has no effect"),
    "_schedule_identify": (HOST, "guards.ask_nobody_for_a_description has no effect"),
    "_swarm_stream_handler": (HOST, "guards.contain_handler_failures contains nothing"),
    "_negative_peer_cache": (SWARM, "guards.leave_retrying_to_us: a failed dial bans its peer for a minute"),
    "_do_handle_inbound_connection": (SWARM, "guards.return_inbound_slots returns none"),
    "_handle_inbound_connection": (SWARM, "guards.remember_sockets forgets those that were accepted"),
    "_is_subscribed_to_msg": (PUBSUB, "UnsignedPubsub limits no peer's gossip"),
    "_handle_dead_peer": (PUBSUB, "UnsignedPubsub keeps a peer whose gossip has ended"),
    "_queue": ("pubsub/rpc_queue.py", "gossip_batches sends each message on its own"),
    "_is_msg_seen": (PUBSUB, "UnsignedPubsub handles each message once per neighbour"),
    "_mark_msg_seen": (PUBSUB, "UnsignedPubsub does not bound the ids that it has seen"),
    "_peer_is_connected": (PUBSUB, "UnsignedPubsub forgets the subscriptions of who came back"),
    "_forget_all_subscriptions": (PUBSUB, "UnsignedPubsub forgets the subscriptions of who came back"),
    "_replayed_recent_topics": (PUBSUB, "who came back is not sent what this node said last"),
    "_measure_rtt_loop": (YAMUX, "both ends of each connection ping it twice a minute"),
    "_stale_stream_sweeper": (YAMUX, "each connection has a timer to clear streams away"),
    "_sweep_stale_streams": (YAMUX, "SilentConnections clears no streams away"),
    "_emit_idontwant_for_message": (GOSSIPSUB, "UnsignedGossipSub refuses small messages at length"),
    "_check_equivocation": (GOSSIPSUB, "messages without an author count as contradictions"),
}
"""Private name -> the library's file that defines it, and what fails here without it."""

READ_WHEN_USED = {
    "read_exactly(self.secured_conn": (YAMUX, "control_keepalive.note_what_comes sees nothing that comes"),
    "nursery.start_soon(self._measure_rtt_loop)": (
        YAMUX,
        "judge_connections_by_what_comes replaces nothing: both ends of each connection ping twice a minute",
    ),
    "nursery.start_soon(self._stale_stream_sweeper)": (
        YAMUX,
        "judge_connections_by_what_comes replaces nothing: each connection has a timer to clear streams away",
    ),
    "await ping_connection(": (
        "network/health/monitor.py",
        "judge_connections_by_what_comes replaces nothing: each connection opens a stream a minute to ping",
    ),
    "min(len(buffer), MAX_MESSAGE_SIZE)": (YAMUX, "frames do not fit one Noise message"),
    "env_to_send_in_RPC(self.pubsub.host)": (GOSSIPSUB, "guards.describe_oneself_rarely has no effect"),
    "env_to_send_in_RPC(self.host)": (PUBSUB, "guards.describe_oneself_rarely has no effect"),
    "maybe_consume_signed_record(rpc_incoming": (PUBSUB, "guards.describe_oneself_rarely has no effect"),
    "maybe_consume_signed_record(rpc,": (GOSSIPSUB, "guards.describe_oneself_rarely has no effect"),
    "= Yamux(": (
        "stream_muxer/muxer_multistream.py",
        "BoundedYamux is never made",
    ),
    "self.auto_connector.maybe_connect": (SWARM, "guards.dial_nobody_unasked has no effect"),
    "sleep(self.heartbeat_interval)": (
        GOSSIPSUB,
        "UnsignedGossipSub does not set the pace of its heartbeat",
    ),
}
"""Text that uses a name which is replaced here -> the library's file, and what fails here without it."""


@cache
def source(file: str) -> str:
    return (LIBRARY / file).read_text("utf-8")


@pytest.mark.parametrize("name", PRIVATE)
def test_the_library_still_has_the_private_name(name: str) -> None:
    file, otherwise = PRIVATE[name]
    is_there = re.search(rf"(def {name}\(|self\.{name}\b.* = )", source(file))
    assert is_there, f"libp2p/{file} has no {name} any more: {otherwise}"


@pytest.mark.parametrize("text", READ_WHEN_USED)
def test_the_library_still_uses_the_name_that_is_replaced_here(text: str) -> None:
    file, otherwise = READ_WHEN_USED[text]
    assert text in source(file), f"libp2p/{file} does not say {text!r} any more: {otherwise}"


def private_names(file: Path) -> set[str]:
    """Private attributes that a file uses and does not define, where it imports libp2p."""
    tree = ast.parse(file.read_text("utf-8"))
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    if not any(name.partition(".")[0] == "libp2p" for name in modules):
        return set()
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if re.match("_[a-z]", node.attr)}
    own = {node.attr for node in attributes if ast.unparse(node.value) == "self" and is_set(node)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in used if name in PRIVATE or name not in own}


def is_set(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def test_no_private_name_is_used_without_a_guard() -> None:
    found = {name: file for file in sorted(OURS.rglob("*.py")) for name in private_names(file)}
    unguarded = {name: str(file.relative_to(OURS)) for name, file in found.items() if name not in PRIVATE}
    assert not unguarded, f"not in PRIVATE: {unguarded}"
    assert len(found) > len(PRIVATE) // 2
