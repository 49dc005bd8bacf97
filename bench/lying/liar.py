"""A member of the swarm that lies: a `Lie` says what it tells and does, a `Liar` does it through any Router.

A lie has four parts, each drawn from the message types: what the liar announces, what it says and asks
unasked, what it answers when it is asked, and what it makes of the jobs it gets (`twists`). Everything else
comes from `untruths`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import trio
from hypothesis import strategies as st

from bench.lying.message_types import JOBS, REQUESTS, RESPONSES
from bench.lying.twists import TWISTS
from bench.lying.untruths import (
    ADDRESSES,
    HONEST,
    LIVE,
    OWN,
    Draw,
    World,
    encoded,
    filled,
    payloads,
    wire_values,
)
from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_job, decode_request, encode_job, encode_record, encode_response
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.swarm import (
    FetchPiece,
    LayerForward,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    Piece,
    PipelineAck,
    PipelineAssignment,
    ProbeStage,
    RemoteGenerateRequest,
    ShardAnnounce,
    StageState,
)

Wire = Any
SEND_TIMEOUT_S: Final = 5.0
MAX_REACTIONS: Final = 64
"""To jobs, per lie: a liar that answers a liar would go on for ever."""
REPLAYED: Final = 16


@dataclass(frozen=True)
class Told:
    """One message that nobody asked for, as MessagePack would have it."""

    kind: Literal["job", "request", "replay"]
    message: Wire = None
    payload: bytes = b""
    to: int = 0
    """Which of the honest nodes."""
    times: int = 1


@dataclass(frozen=True)
class Lie:
    lure: tuple[int, int] | None
    """Layers that it announces as if they cost nothing, so that routes lead there."""
    record: Wire
    """What it announces after that; None: nothing else."""
    tells: tuple[Told, ...]
    answers: Wire
    """To every request; "yes": as it should be; "silent": nothing; "garbage": no message."""
    known: bool
    busy: bool
    """What it says of the requests in which it takes part."""
    twists: tuple[str, ...]
    """What it does with the jobs it gets, one after the other; the last one stays."""
    reactions: tuple[Told, ...]
    """What it sends besides, at every job."""


def lies(world: World) -> st.SearchStrategy[Lie]:
    third = world.n_layers // 3
    lures = st.sampled_from(
        (
            None,
            None,
            (0, third),
            (third, 2 * third),
            (third, 2 * third),
            (2 * third, world.n_layers),
            (0, world.n_layers),
        )
    )

    @st.composite
    def told(draw: Draw) -> Told:
        kind = draw(st.sampled_from(("job", "job", "request", "request", "replay")))
        if kind == "replay":
            return Told("replay", to=draw(st.integers(0, 2)), times=draw(st.sampled_from((1, 3))))
        message = draw(
            st.sampled_from(JOBS if kind == "job" else REQUESTS).flatmap(
                lambda each: wire_values(each, world)
            )
        )
        payload = draw(payloads(world)) if kind == "job" else b""
        return Told(kind, message, payload, draw(st.integers(0, 2)), draw(st.sampled_from((1, 1, 1, 2, 9))))

    record = st.one_of(st.none(), _records(world))
    answer = st.one_of(
        st.just("yes"),
        st.just("yes"),
        st.just("yes"),
        st.sampled_from(("silent", "garbage", "raises")),
        st.sampled_from(RESPONSES).flatmap(lambda each: wire_values(each, world)),
    )
    return st.builds(
        Lie,
        lure=lures,
        record=record,
        tells=st.lists(told(), max_size=3).map(tuple),
        answers=answer,
        known=st.booleans(),
        busy=st.booleans(),
        twists=st.lists(st.sampled_from(sorted(TWISTS)), min_size=1, max_size=3).map(tuple),
        reactions=st.one_of(st.just(()), st.lists(told(), max_size=2).map(tuple)),
    )


def _records(world: World) -> st.SearchStrategy[Wire]:
    """Its own, mostly: nobody may write another's."""
    mine = wire_values(NodeRecord, world).map(
        lambda record: record | {"node_id": world.own_id} if isinstance(record, dict) else record
    )
    return st.one_of(mine, mine, mine, wire_values(NodeRecord, world))


def lure(world: World, layers: tuple[int, int]) -> bytes:
    """A record that makes every route lead through these layers of the liar."""
    capability = NodeCapability(
        memory_total_bytes=1 << 40,
        memory_free_bytes=1 << 40,
        max_requests=1000,
        memory_bytes_per_s=1e15,
        flops=1e18,
        slots=64,
        free_slots=64,
        free_kv_tokens=1 << 20,
        commits=True,
        observed_latencies=(ObservedLatency(model_id=world.model_id, decode_s=1e-12, prefill_s=1e-12),),
        observed_links=tuple(
            ObservedLink(node_id=node_id, rtt_s=0.0, bytes_per_s=1e15) for node_id in world.honest_ids
        ),
    )
    announced = ShardAnnounce(
        model_id=world.model_id, name="guide", n_layers=world.n_layers, ranges=(layers,)
    )
    return encode_record(
        NodeRecord(
            node_id=world.own_id,
            nickname="liar",
            started_at=1.7e9,
            models=(announced,),
            capability=capability,
        )
    )


@dataclass
class Liar:
    """`router` is the project's own; what goes through it is not."""

    router: Router
    world: World
    lie: Lie
    start_soon: Callable[..., object]
    live: Callable[[], str | None] = lambda: None
    """Id of a request of others that is under way."""
    n_accepted: int = 0
    """Assignments."""
    assigned: dict[str, PipelineAssignment] = field(default_factory=dict)
    heard: deque[tuple[bytes, bytes]] = field(default_factory=lambda: deque(maxlen=REPLAYED))
    """Jobs, as they came: old truths."""
    n_reactions: int = 0
    n_jobs: int = 0
    failures: list[BaseException] = field(default_factory=list)
    """Its own defects: a liar that falls over proves nothing."""

    def serve(self) -> None:
        self.router.serve(self.on_request, self.on_message)

    async def announce(self) -> None:
        if self.lie.lure is not None:
            await self.router.publish(lure(self.world, self.lie.lure))

    async def tell(self) -> None:
        """Everything that it says unasked."""
        if self.lie.record is not None:
            record = encoded(self._filled(self.lie.record))
            with contextlib.suppress(ValueError):  # Too large: its own router does not spread it.
                await self.router.publish(record)
        for told in self.lie.tells:
            await self._tell(told)

    async def on_request(self, sender: str, body: bytes) -> bytes:
        try:
            request = decode_request(body)
        except ProtocolError:
            raise RemoteError("no") from None
        if self.lie.answers == "silent":
            await trio.sleep(600)
        if self.lie.answers == "raises":
            raise RemoteError("no")
        if self.lie.answers == "garbage":
            return b"\xc1garbage"
        if self.lie.answers != "yes":
            return encoded(self._filled(self.lie.answers))
        if isinstance(request, PipelineAssignment):
            self.n_accepted += 1
            self.assigned[request.request_id] = request
            return encode_response(PipelineAck(request_id=request.request_id, accepted=True))
        if isinstance(request, ProbeStage):
            return encode_response(
                StageState(request_id=request.request_id, known=self.lie.known, busy=self.lie.busy)
            )
        if isinstance(request, FetchPiece):
            return encode_response(Piece(status="ok", data=memoryview(b"\0" * min(request.size_bytes, 4096))))
        raise RemoteError("no")

    async def on_message(self, sender: str, header: bytes, payload: memoryview) -> None:
        try:
            message = decode_job(header, payload)
        except ProtocolError:
            return
        self.heard.append((header, bytes(payload)))
        if self.n_reactions < MAX_REACTIONS and isinstance(message, LayerForward | RemoteGenerateRequest):
            self.n_reactions += 1
            self.start_soon(self._react, message, bytes(payload))

    async def _react(self, job: LayerForward | RemoteGenerateRequest, payload: bytes) -> None:
        assignment = self.assigned.get(job.request_id)
        if assignment is None:
            return
        twist = TWISTS[self.lie.twists[min(self.n_jobs, len(self.lie.twists) - 1)]]
        self.n_jobs += 1
        for to, message, body in twist(self.world, assignment, job, payload):
            await self._send(to, *encode_job(message, body))
        for told in self.lie.reactions:
            await self._tell(told)

    async def _tell(self, told: Told) -> None:
        to = self.world.honest_ids[told.to % len(self.world.honest_ids)]
        for _ in range(told.times):
            if told.kind == "replay":
                for header, payload in list(self.heard):
                    await self._send(to, header, payload)
            elif told.kind == "request":
                await self._ask(to, encoded(self._filled(told.message)))
            else:
                header, payload = job_bytes(self._filled(told.message), told.payload)
                await self._send(to, header, payload)

    async def _ask(self, to: str, body: bytes) -> None:
        with trio.move_on_after(SEND_TIMEOUT_S):
            with contextlib.suppress(SwarmLLMError, ValueError):
                await self.router.request(to, body, timeout_s=SEND_TIMEOUT_S)

    async def _send(self, to: str, header: bytes, payload: bytes | memoryview) -> None:
        with trio.move_on_after(SEND_TIMEOUT_S):
            with contextlib.suppress(SwarmLLMError, ValueError):
                await self.router.send(to, header, bytes(payload))

    def _filled(self, value: Wire) -> Wire:
        """With the ids of what is under way now."""
        live = self.live() or next(reversed(self.assigned), "nobody's")
        names = {LIVE: live, OWN: self.world.own_id}
        names |= dict(zip(HONEST, self.world.honest_ids, strict=True))
        return filled(value, names | dict(zip(ADDRESSES, self.world.addresses, strict=True)))


def job_bytes(message: Wire, payload: bytes) -> tuple[bytes, bytes]:
    """With the digest that it should have, where it is a job that has one."""
    header = encoded(message)
    if isinstance(message, dict) and message.get("type") == "LayerForward":
        try:
            proper = msgspec.msgpack.decode(header, type=LayerForward)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return header, payload
        header, _ = encode_job(proper, payload)
    return header, payload
