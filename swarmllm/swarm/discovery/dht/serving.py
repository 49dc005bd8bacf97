"""Answering others in the DHT, whatever they send: bounded in size, in time, in number.

A stream carries a few questions one after the other. Who asks faster than QUESTIONS_PER_S for longer than a
burst, opens more streams at once than STREAMS_PER_PEER, or sends what is no message has its stream reset.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from swarmllm.swarm.discovery.dht.core import DhtCore, DhtNode
from swarmllm.swarm.discovery.dht.messages import MESSAGE_MAX_BYTES, decode, encode
from swarmllm.swarm.libp2p.host import Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.parts import Parts
from swarmllm_proto.errors import FrameTruncated, ProtocolError
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

STREAMS_PER_PEER = 8
STREAMS_MAX = 256
QUESTIONS_PER_STREAM = 64
QUESTIONS_PER_S = 50.0
BURST = 200.0
"""A hundred models announced at once, by id and by name."""
READ_S = 10.0
WRITE_S = 10.0
_ASKERS_MAX = 1024


@dataclass(slots=True)
class DhtAsker:
    allowance: float = BURST
    """Of questions, at `at_s`; it grows from there."""
    at_s: float = 0.0
    n_streams: int = 0

    def grow(self, now: float) -> None:
        self.allowance = min(BURST, self.allowance + (now - self.at_s) * QUESTIONS_PER_S)
        self.at_s = now

    def is_over(self, now: float) -> bool:
        """It is as one that has never asked."""
        self.grow(now)
        return not self.n_streams and self.allowance >= BURST


class Serving:
    def __init__(
        self,
        core: DhtCore,
        node: DhtNode,
        peers: Parts[DhtAsker] | None = None,
    ) -> None:
        self._core = core
        self._node = node
        self._askers: Parts[DhtAsker] = Parts.alone() if peers is None else peers
        self._n_streams = 0
        self.n_answered = 0
        self.n_refused = 0

    async def serve(self, sender: NodeId, stream: Stream) -> None:
        """One stream; the host closes it afterwards."""
        if not self._node.serves():
            await stream.reset()
            return
        asker = self._asker(sender)
        if asker.n_streams >= STREAMS_PER_PEER or self._n_streams >= STREAMS_MAX:
            await self._refuse(stream, "too many streams")
            return
        asker.n_streams += 1
        self._n_streams += 1
        try:
            for _ in range(QUESTIONS_PER_STREAM):
                if not await self._answer_one(sender, asker, stream):
                    break
            await stream.close()
        except FrameTruncated:
            await stream.reset()
        except (ProtocolError, trio.TooSlowError) as error:
            await self._refuse(stream, str(error) or "too slow")
        finally:
            asker.n_streams -= 1
            self._n_streams -= 1

    async def _answer_one(self, sender: NodeId, asker: DhtAsker, stream: Stream) -> bool:
        """False: the sender has nothing more to ask."""
        with trio.fail_after(READ_S):
            try:
                content = await read_framed(stream, MESSAGE_MAX_BYTES)
            except ProtocolError:
                raise
            except Exception:  # whatever libp2p calls the end of a stream
                return False
        now = trio.current_time()
        if not self._may_ask(asker, now):
            await self._refuse(stream, "too many questions")
            return False
        answer = self._core.answer(sender, decode(content), now)
        self.n_answered += 1
        if answer is not None:
            with trio.fail_after(WRITE_S):
                await stream.write(framed(encode(answer)))
        return True

    async def _refuse(self, stream: Stream, why: str) -> None:
        self.n_refused += 1
        log.debug("a stream of the DHT is refused: %s", why)
        await stream.reset()

    def _may_ask(self, asker: DhtAsker, now: float) -> bool:
        asker.grow(now)
        if asker.allowance < 1:
            return False
        asker.allowance -= 1
        return True

    def _asker(self, sender: NodeId) -> DhtAsker:
        if (asker := self._askers.get(sender)) is not None:
            return asker
        if len(self._askers) >= _ASKERS_MAX:
            idle = next((who for who, asker in self._askers.items() if not asker.n_streams), None)
            if idle is not None:
                self._askers.drop(idle)
        return self._askers.put(sender, DhtAsker(at_s=trio.current_time()))
