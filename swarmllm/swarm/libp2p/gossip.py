"""Gossip: what a node says about itself, to everybody, through everybody (gossipsub).

Topics: `swarm/models` carries envelopes (on change), `swarm/health` heartbeats (every few seconds); in a
private swarm each is followed by `/{network_id}`.

Messages carry their own signature (see envelope.py), so gossipsub's is off (see unsigned_pubsub.py): with it,
every receiver parses a key of the sender's making, which is one of the ways a message kills a stock host.
They are identified by their content, not by the sender's claim of origin and number: such a claim is free,
and with it anybody could have another node's next message taken for a repeat. What does not verify is not
forwarded.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.pubsub import gossipsub
from libp2p.tools.anyio_service import background_trio_service

from swarmllm.log_filter import provoked_by
from swarmllm.swarm.libp2p.gossip_budget import GossipAllowance, GossipBudget
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.libp2p.unsigned_pubsub import UnsignedGossipSub, UnsignedPubsub
from swarmllm.swarm.peers.parts import Parts
from swarmllm.swarm.peers.trust import Deed, Note, unnoted
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

MODELS = "swarm/models"
HEALTH = "swarm/health"

_HEARTBEAT_S = 1
"""Of the mesh's upkeep. The library's default of 120 s leaves a new node deaf for minutes."""
_VERDICTS_MAX = 128
"""Kept of messages, so that one that comes twice at the same moment is checked once. The library's list of a
thousand is searched from its beginning for each message."""
_MESSAGES_PER_TOPIC_PER_S = 1000
"""Counted on the forwarder, who in a mesh speaks for everybody: the default of 10 silences honest nodes."""

Validate = Callable[[str, bytes], bool | None]
"""(topic, content) -> whether to pass it on. None: no, and its forwarder is not to blame."""
Receive = Callable[[str, bytes], None]


class Gossip:
    """Outlives a crash of libp2p, as its host does; in between nothing is published."""

    def __init__(
        self,
        network_id: str,
        validate: Validate,
        receive: Receive,
        size_max_bytes: dict[str, int],
        note: Note = unnoted,
        peers: Parts[GossipAllowance] | None = None,
    ) -> None:
        """`validate(topic, content)` decides what is passed on, `receive` gets what was; neither may
        block."""
        self.network_id = network_id
        self.validate = validate
        self.receive = receive
        self.size_max_bytes = size_max_bytes
        self.note = note
        self.budget = GossipBudget(peers=peers)
        self._pubsub: Any = None

    def attach(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    async def publish(self, topic: str, content: bytes) -> None:
        """Never raises for the network's sake: who misses it learns of it from a heartbeat."""
        if self._pubsub is None:
            return
        try:
            await self._pubsub.publish(topic_name(topic, self.network_id), content)
        except Exception as error:
            log.warning("gossip on %s failed: %s", topic, type(error).__name__)


@asynccontextmanager
async def run_gossip(gossip: Gossip, host: Host) -> AsyncIterator[None]:
    """On the libp2p host that is attached now, until the context is left."""
    size_max_bytes, network_id = gossip.size_max_bytes, gossip.network_id
    router = UnsignedGossipSub(
        protocols=[gossipsub.PROTOCOL_ID_V12, gossipsub.PROTOCOL_ID_V11, gossipsub.PROTOCOL_ID],
        # Each message comes as many times as there are neighbours; up to twelve, as the library has it,
        # are half of what a swarm of fifty has to do. What is missed is fetched.
        degree=5,
        degree_low=4,
        degree_high=8,
        heartbeat_interval=_HEARTBEAT_S,
        # It slows the heart down to once a minute where the mesh is in a bad way, as it is in a small swarm,
        # and all that is cleared away at each beat piles up meanwhile.
        adaptive_gossip_enabled=False,
        max_messages_per_topic_per_second=_MESSAGES_PER_TOPIC_PER_S,
    )
    pubsub = UnsignedPubsub(
        host.libp2p_host,
        router,
        strict_signing=False,
        msg_id_constructor=_content_id,
        validation_cache_size=_VERDICTS_MAX,
        allowed_topics={topic_name(topic, network_id) for topic in size_max_bytes},
    )
    pubsub.note, pubsub.budget = gossip.note, gossip.budget
    for topic, size_max in size_max_bytes.items():
        name = topic_name(topic, network_id)
        pubsub.set_topic_validator(
            name,
            guarded_validator(topic, name, size_max, gossip.validate, gossip.note),
            is_async_validator=False,
        )
    async with (
        background_trio_service(pubsub),
        background_trio_service(router),
        trio.open_nursery() as nursery,
    ):
        await pubsub.wait_until_ready()
        for topic in size_max_bytes:
            subscription = await pubsub.subscribe(topic_name(topic, network_id))
            nursery.start_soon(_drain, subscription, topic, gossip.receive)
        gossip.attach(pubsub)
        try:
            yield
        finally:
            gossip.attach(None)
            nursery.cancel_scope.cancel()


def topic_name(topic: str, network_id: str) -> str:
    """As the wire has it."""
    return f"{topic}/{network_id}" if network_id else topic


def _content_id(message: Any) -> bytes:
    return hashlib.sha256(b"\0".join((*(t.encode() for t in message.topicIDs), message.data))).digest()


def guarded_validator(
    topic: str, name: str, size_max: int, validate: Validate, note: Note = unnoted
) -> Callable[[Any, Any], bool]:
    """A validator that raises would end the process. What is not valid counts against the peer that passed it
    on, because an honest peer checks it first."""

    def validator(forwarder: Any, message: Any) -> bool:
        try:
            is_valid = (
                list(message.topicIDs) == [name]
                and len(message.data) <= size_max
                and validate(topic, message.data)
            )
        except Exception:
            provoked_by(log, str(forwarder)).exception("validating gossip on %s", topic)
            return False
        if is_valid is False:
            note(NodeId(str(forwarder)), Deed.BROKE_PROTOCOL, f"invalid gossip on {topic}")
        return bool(is_valid)

    return validator


async def _drain(subscription: Any, topic: str, receive: Receive) -> None:
    """The library's queue is short and drops what does not fit: nothing may ever wait in it."""
    while True:
        try:
            message = await subscription.get()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            return
        try:
            receive(topic, message.data)
        except Exception:
            provoked_by(log, "gossip").exception("taking in gossip on %s", topic)
