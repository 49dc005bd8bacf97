"""Asking another node in the DHT, connecting with it first where that is needed.

Each exchange is a task of its own that its caller's deadline does not reach: half a dial or half a write
cancelled would break a connection that others use. It ends by its own deadlines, and a stream that is stuck
takes its connection with it.
"""

from __future__ import annotations

import logging

import trio

from swarmllm.errors import NodeUnreachable, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import Outcome, spawn
from swarmllm.swarm.discovery.dht.core import DhtNode
from swarmllm.swarm.discovery.dht.messages import MESSAGE_MAX_BYTES, Contact, Message, decode, encode
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm_proto.errors import ProtocolError

log = logging.getLogger(__name__)

ASK_S = 5.0
"""For a question and its answer, the dial included."""
UNDER_WAY_MAX = 16
_STUCK_S = 10.0
_END_S = 2.0


class Asking:
    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        protocol: str,
        node: DhtNode,
        peers_max: int,
    ) -> None:
        """A node that was asked in passing is let go when this one has `peers_max`: as many as it looks
        for."""
        self._host = host
        self._nursery = nursery
        self._protocol = protocol
        self._node = node
        self._peers_max = peers_max
        self._turns = trio.Semaphore(UNDER_WAY_MAX)

    async def ask(self, contact: Contact, question: Message) -> Message:
        """Raises NodeUnreachable, whatever went wrong."""
        try:
            return await self._run(contact, question, expects_answer=True)
        except SwarmLLMError as error:
            raise NodeUnreachable(f"node {contact.node_id} in the DHT: {error.message}") from None

    async def tell(self, contact: Contact, statement: Message) -> bool:
        """What has no answer. Whether it was sent."""
        try:
            await self._run(contact, statement, expects_answer=False)
        except SwarmLLMError:
            return False
        return True

    async def _run(self, contact: Contact, message: Message, *, expects_answer: bool) -> Message:
        if not self._node.lets_in(contact.node_id):
            raise NodeUnreachable("it is not let in")
        with trio.move_on_after(ASK_S):
            async with self._turns:
                exchange: Outcome[Message] = Outcome()
                spawn(
                    self._nursery,
                    "question",
                    self._converse,
                    contact,
                    message,
                    expects_answer,
                    exchange,
                    failed=exchange.fail,
                )
                return await exchange.wait()
        raise NodeUnreachable("no answer in time")

    async def _converse(
        self, contact: Contact, message: Message, expects_answer: bool, exchange: Outcome[Message]
    ) -> None:
        """What it comes to is told at once; of a stranger when the connection may have been let go."""
        stream: Stream | None = None
        answer: Message | None = None
        failure = "no answer in time"
        is_stranger = not self._host.is_connected(contact.node_id)

        def settle() -> None:
            if answer is not None:
                exchange.succeed(answer)
            else:
                exchange.fail(NodeUnreachable(failure))

        with trio.move_on_after(_STUCK_S) as stuck:
            try:
                if is_stranger:
                    await self._host.dial(contact.node_id, list(contact.addresses))
                stream = await self._host.open_stream(
                    contact.node_id, self._protocol, framed(encode(message))
                )
                if expects_answer:
                    with trio.fail_after(ASK_S):
                        answer = decode(await read_framed(stream, MESSAGE_MAX_BYTES))
                else:
                    answer = message
            except (NodeUnreachable, ProtocolError) as error:
                failure = str(error)
            except Exception as error:  # libp2p's, of many kinds
                failure = type(error).__name__
            finally:
                if not is_stranger:
                    settle()
        if stuck.cancelled_caught:
            provoked_by(log, contact.node_id).info(
                "a question in the DHT to node %s is stuck; closing the connection", contact.node_id
            )
            await self._host.close_hard(contact.node_id)
        elif stream is not None:
            with trio.move_on_after(_END_S):
                try:
                    await (stream.close() if answer is not None else stream.reset())
                except Exception as error:
                    log.debug("ending a stream of the DHT: %s", type(error).__name__)
        if is_stranger and len(self._host.connected()) > self._peers_max:
            self._node.let_go(contact.node_id)
        settle()
