"""The Router over a real network: libp2p for control, direct TCP for data.

This file only composes. Who is *connected* is decided here, in one place: a peer counts from the moment its
records have been exchanged (so whoever sees it connected also sees its record) until the first of
  - its data connection is lost: it died, froze or lost its network, and messages may be missing;
  - it said goodbye;
  - libp2p lost it and did not find it again for some seconds, or at once where there is no data connection.
Then everything that leads to it is closed together, its pending requests fail, and the dialler starts over.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec
import trio

from swarmllm.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnreachable,
    RemoteError,
    SwarmLLMError,
)
from swarmllm.swarm.addresses import Address, NodeAddress, announced_ips, is_loopback
from swarmllm.swarm.answering import (
    RequestRefused,
    answer,
    check_message,
    check_record,
    check_request,
    deliver,
)
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.dataplane import DataPlane, open_listeners
from swarmllm.swarm.dialler import Dialler
from swarmllm.swarm.envelope import ENVELOPE_MAX, HEARTBEAT_MAX, Envelope, Heartbeat, seal, unseal
from swarmllm.swarm.gossip import HEALTH, MODELS, Gossip, open_gossip
from swarmllm.swarm.host import Host, open_host
from swarmllm.swarm.identity import Identity, load_or_create_identity, verify
from swarmllm.swarm.lock import locked_data_dir
from swarmllm.swarm.mdns import run_mdns
from swarmllm.swarm.memory_link import LinkQuality, MemoryLink
from swarmllm.swarm.record_book import RecordBook
from swarmllm.swarm.record_exchange import KIND_APPLICATION, RecordExchange
from swarmllm.swarm.requests import Requests
from swarmllm.swarm.router import Change, MessageHandler, PeerInfo, RequestHandler
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.errors import BadMessage

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
_HOUSEKEEPING_S = 15.0
_GREET_RETRY_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_LIBP2P_GRACE_S = 10.0
"""How long a healthy data connection carries a peer that libp2p has lost."""
_LARGER_ID_WAITS_S = 3.0
_GOODBYE_S = 1.0
_RESOLVE_AGAIN_S = 300.0
_RESOLVE_RETRY_S = 15.0
_EXCHANGE_S = 10.0
_FETCHES_MAX = 8
_INCARNATION_NAME = "incarnation"


class _Dialling:
    """A dial that goes on if its caller does not wait for it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.failure: NodeUnreachable | None = None


class Libp2pRouter:
    """Use `open_libp2p_router`."""

    def __init__(self, identity: Identity, host: Host, nursery: trio.Nursery, started_at_ms: int) -> None:
        self._identity = identity
        self._host = host
        self._nursery = nursery
        self._book = RecordBook(identity.node_id, verify)
        self._feed = ChangeFeed()
        self._connected_since_s: dict[str, float] = {}
        self._greeting: set[str] = set()
        self._fetching: set[str] = set()
        self._records: Mapping[str, bytes] = MappingProxyType({})
        self._on_request: RequestHandler | None = None
        self._on_message: MessageHandler | None = None
        self._own = Envelope(node_id=identity.node_id, started_at_ms=started_at_ms, sequence=0)
        self._n_beats = 0
        self._gossip: Gossip | None = None
        self._requests = Requests(host, nursery, self._answer)
        self._exchange = RecordExchange(self._book, self._ask, self._take_envelope)
        self._dialler = Dialler(identity.node_id, random.Random())
        self._plane = DataPlane(
            identity,
            host,
            nursery,
            addresses=self._data_addresses,
            deliver=self._deliver,
            lost=self._drop,
        )
        self._to_self = MemoryLink(identity.node_id, self._deliver, LinkQuality())
        host.watch_peers(self._libp2p_connected, self._libp2p_disconnected)

    def __repr__(self) -> str:
        return f"<Libp2pRouter {self.node_id} connected={len(self._connected_since_s)}>"

    # The Router protocol.

    @property
    def node_id(self) -> str:
        return self._identity.node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{address}/p2p/{self.node_id}" for address in self._own.addresses)

    @property
    def data_addresses(self) -> tuple[str, ...]:
        return self._own.data_addresses

    @property
    def host(self) -> Host:
        return self._host

    @property
    def plane(self) -> DataPlane:
        return self._plane

    def records(self) -> Mapping[str, bytes]:
        return self._records

    async def publish(self, record: bytes) -> None:
        check_record(record)
        sequence = self._own.sequence + 1
        await self._publish(msgspec.structs.replace(self._own, sequence=sequence, record=bytes(record)))

    def connected(self) -> frozenset[str]:
        return frozenset(self._connected_since_s)

    def peers(self) -> tuple[PeerInfo, ...]:
        return tuple(self._peer(node_id) for node_id in sorted(self._connected_since_s))

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        return self._feed.subscribe()

    def serve(self, on_request: RequestHandler, on_message: MessageHandler) -> None:
        self._on_request, self._on_message = on_request, on_message

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> str:
        """Returns once the node counts as connected."""
        where = NodeAddress.parse(address, field="address")
        node_id = where.node_id
        if node_id == self.node_id:
            return node_id
        async with self.changes() as changes:
            dialling = _Dialling()
            self._nursery.start_soon(self._dial_for_caller, where, dialling)
            with trio.move_on_after(timeout_s):
                await dialling.over.wait()
                if dialling.failure is not None:
                    raise dialling.failure
                while node_id not in self._connected_since_s:
                    await anext(changes)
                return node_id
        raise DeadlineExceeded(f"node {node_id} was not reached within {timeout_s:g} s")

    async def request(self, node_id: str, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        check_request(body)
        if node_id == self.node_id:
            return await self._request_to_self(body, timeout_s)
        # A peer may have greeted this node before this node has greeted it: to answer it must be possible.
        if node_id not in self._connected_since_s and not self._host.is_connected(node_id):
            raise NodeUnreachable(f"node {node_id} is not connected")
        return await self._requests.request(node_id, KIND_APPLICATION, bytes(body), timeout_s=timeout_s)

    async def send(self, node_id: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        size_bytes = check_message(header, payload)
        if node_id == self.node_id:
            await self._to_self.send(bytes(header), bytes(payload), size_bytes)
            return
        if node_id not in self._connected_since_s and not self._plane.has_connection(node_id):
            raise NodeUnreachable(f"node {node_id} is not connected")
        await self._plane.send(node_id, header, payload)

    # Life.

    def start(
        self,
        gossip: Gossip,
        listeners: Sequence[trio.SocketListener],
        ips: list[str],
        bootstrap: list[NodeAddress],
    ) -> None:
        self._plane.serve(listeners)
        self._gossip = gossip
        self._own = Envelope(
            node_id=self.node_id,
            started_at_ms=self._own.started_at_ms,
            sequence=0,
            addresses=tuple(str(Address(ip, self._host.port)) for ip in ips),
            data_addresses=tuple(str(Address(ip, self._plane.port)) for ip in ips),
        )
        self._book.write_own(self._own, seal(self._own, self._identity.sign), trio.current_time())
        self._nursery.start_soon(self._to_self.carry)
        self._nursery.start_soon(self._send_heartbeats)
        self._nursery.start_soon(self._keep_house)
        for node_address in bootstrap:
            self._nursery.start_soon(self._keep_resolving, node_address)
        self._nursery.start_soon(self._dialler.run, self._host.dial, self._host.connected)

    async def stop(self) -> None:
        """Leave: tell the neighbours, and take nothing more to heart."""
        self._host.ignore_peers()
        with trio.move_on_after(_GOODBYE_S):
            await self._plane.say_goodbye()

    def found_by_mdns(self, node_id: str, addresses: list[Address]) -> None:
        self._dialler.suggest(node_id, addresses, trio.current_time())

    # Gossip.

    def validate_gossip(self, topic: str, content: bytes) -> bool:
        try:
            if topic == MODELS:
                unseal(content, Envelope, verify)
            else:
                unseal(content, Heartbeat, verify)
        except BadMessage as error:
            log.debug("gossip on %s refused: %s", topic, error)
            return False
        return True

    def receive_gossip(self, topic: str, content: bytes) -> None:
        if topic == MODELS:
            self._take_envelope(content, {})
            return
        heartbeat = unseal(content, Heartbeat, verify)
        if heartbeat.node_id == self.node_id:
            return
        if self._book.hear(heartbeat.node_id, heartbeat.version, trio.current_time()):
            self._fetch_soon(heartbeat.node_id)

    async def _publish(self, envelope: Envelope) -> None:
        self._own = envelope
        sealed = seal(envelope, self._identity.sign)
        self._book.write_own(envelope, sealed, trio.current_time())
        self._records = MappingProxyType(self._book.records())
        self._feed.announce(Change("record", self.node_id))
        if self._gossip is not None:
            await self._gossip.publish(MODELS, sealed)

    async def _send_heartbeats(self) -> None:
        assert self._gossip is not None
        while True:
            self._n_beats += 1
            heartbeat = Heartbeat(
                node_id=self.node_id,
                started_at_ms=self._own.started_at_ms,
                sequence=self._own.sequence,
                beat=self._n_beats,
            )
            await self._gossip.publish(HEALTH, seal(heartbeat, self._identity.sign))
            await trio.sleep(HEARTBEAT_S)

    def _fetch_soon(self, node_id: str) -> None:
        """Get a newer envelope of which a heartbeat told: from its writer, else from whoever is connected."""
        if node_id in self._fetching or len(self._fetching) >= _FETCHES_MAX or not self._connected_since_s:
            return
        source = (
            node_id if node_id in self._connected_since_s else random.choice(list(self._connected_since_s))
        )
        self._fetching.add(node_id)

        async def fetch() -> None:
            try:
                await self._exchange.fetch(source, {node_id: 0.0})
            except SwarmLLMError as error:
                log.debug("the envelope of %s was not to be had: %s", node_id, error)
            finally:
                self._fetching.discard(node_id)

        self._nursery.start_soon(fetch)

    def _take_envelope(self, sealed: bytes, ages_s: Mapping[str, float]) -> str:
        now = trio.current_time()
        verdict, node_id = self._book.take(sealed, now, connected=self._connected_since_s, ages_s=ages_s)
        if verdict == "refused" and node_id == self.node_id:
            log.error("another node uses this node's identity; was the data folder copied?")
        if verdict == "new" and (envelope := self._book.envelope(node_id)) is not None:
            self._plane.forgive(node_id)
            self._dialler.suggest(node_id, _parsed(envelope.addresses), now)
            self._records = MappingProxyType(self._book.records())
            if envelope.record:
                self._feed.announce(Change("record", node_id))
        return node_id

    async def _keep_house(self) -> None:
        while True:
            await trio.sleep(_HOUSEKEEPING_S)
            gone = self._book.expire(trio.current_time(), self._connected_since_s)
            for node_id in gone:
                self._dialler.forget(node_id)
                self._feed.announce(Change("record", node_id))
            if gone:
                self._records = MappingProxyType(self._book.records())

    # Who is connected.

    def _libp2p_connected(self, node_id: str) -> None:
        if node_id not in self._greeting and node_id != self.node_id:
            self._greeting.add(node_id)
            self._nursery.start_soon(self._greet, node_id)

    async def _greet(self, node_id: str) -> None:
        """Exchange records with a peer that libp2p has; then it counts."""
        try:
            for retry_s in (*_GREET_RETRY_S, None):
                if not self._host.is_connected(node_id):
                    return
                try:
                    await self._exchange.synchronise(node_id)
                    break
                except SwarmLLMError as error:
                    log.debug("greeting %s: %s", node_id, error)
                    if retry_s is None:
                        log.info("peer %s does not answer as a node; letting it go", node_id)
                        await self._host.close_hard(node_id)
                        return
                await trio.sleep(retry_s)
        finally:
            self._greeting.discard(node_id)
        if self._host.is_connected(node_id) and node_id not in self._connected_since_s:
            self._connected_since_s[node_id] = time.time()
            log.info("node %s connected", node_id)
            self._feed.announce(Change("connected", node_id))
            await self._reach_early(node_id)

    async def _reach_early(self, node_id: str) -> None:
        """Have the data connection before it is needed: it also tells of life. One end dials; the other only
        if it must."""
        if self.node_id > node_id:
            await trio.sleep(_LARGER_ID_WAITS_S)
        if node_id in self._connected_since_s and not self._plane.has_connection(node_id):
            try:
                await self._plane.reach(node_id)
            except NodeUnreachable as error:
                log.info("no data connection to %s yet: %s", node_id, error)

    def _libp2p_disconnected(self, node_id: str) -> None:
        self._dialler.wake()
        if node_id not in self._connected_since_s:
            return
        if self._plane.has_connection(node_id):
            self._nursery.start_soon(self._await_libp2p, node_id)
            self._dialler.lost(node_id, trio.current_time(), on_purpose=False)
        else:
            self._drop(node_id, "libp2p lost it")

    async def _await_libp2p(self, node_id: str) -> None:
        await trio.sleep(_LIBP2P_GRACE_S)
        if not self._host.is_connected(node_id):
            self._drop(node_id, "libp2p lost it and did not find it again")

    def _drop(self, node_id: str, how: str) -> None:
        was_connected = self._connected_since_s.pop(node_id, None) is not None
        self._plane.close(node_id, how)
        self._requests.lose(node_id)
        self._dialler.lost(node_id, trio.current_time(), on_purpose=how == "goodbye")
        self._nursery.start_soon(self._host.close_hard, node_id)
        if was_connected:
            log.info("node %s disconnected: %s", node_id, how)
            self._feed.announce(Change("disconnected", node_id))

    # Requests and messages.

    async def _ask(self, node_id: str, kind: int, body: bytes) -> bytes:
        return await self._requests.request(node_id, kind, body, timeout_s=_EXCHANGE_S)

    async def _answer(self, sender: str, kind: int, body: bytes) -> bytes:
        if kind != KIND_APPLICATION:
            return self._exchange.answer(kind, body)
        return await answer(self._on_request, sender, body)

    async def _request_to_self(self, body: bytes, timeout_s: float) -> bytes:
        with trio.move_on_after(timeout_s):
            try:
                return await answer(self._on_request, self.node_id, bytes(body))
            except RequestRefused as refusal:
                raise RemoteError(f"node {self.node_id}: {refusal}") from None
        raise DeadlineExceeded(f"node {self.node_id} did not answer within {timeout_s:g} s")

    async def _deliver(self, sender: str, header: bytes, payload: memoryview) -> None:
        await deliver(self._on_message, sender, header, payload)

    async def _keep_resolving(self, where: NodeAddress) -> None:
        """Names may come to mean another address while the daemon runs, and may resolve only after it
        started."""
        while True:
            addresses = await where.resolve()
            if addresses:
                self._dialler.suggest(where.node_id, addresses, trio.current_time(), lasting=True)
            else:
                log.warning("the bootstrap address %s does not resolve", where.host)
            await trio.sleep(_RESOLVE_AGAIN_S if addresses else _RESOLVE_RETRY_S)

    async def _dial_for_caller(self, where: NodeAddress, dialling: _Dialling) -> None:
        try:
            await self._host.dial(where.node_id, await where.resolve())
        except NodeUnreachable as error:
            dialling.failure = error
        dialling.over.set()

    def _data_addresses(self, node_id: str) -> list[Address]:
        envelope = self._book.envelope(node_id)
        return _parsed(envelope.data_addresses) if envelope else []

    def _peer(self, node_id: str) -> PeerInfo:
        link = self._plane.status(node_id)
        envelope = self._book.envelope(node_id)
        return PeerInfo(
            node_id=node_id,
            addresses=envelope.addresses if envelope else (),
            rtt_s=link.rtt_s,
            data_plane=link.kind,
            bytes_sent=link.n_bytes_sent,
            bytes_received=link.n_bytes_received,
            connected_since=self._connected_since_s[node_id],
        )


@asynccontextmanager
async def open_libp2p_router(settings: SwarmSettings) -> AsyncIterator[Libp2pRouter]:
    """Join the swarm until the context is left; leaving says goodbye.

    Raises ConfigError (folder in use, unreadable identity, port taken) and InvalidRequest (an address in the settings).
    What is raised inside the context comes out as it is, unless something else fails at the same time.
    """
    bootstrap = [NodeAddress.parse(text, field="bootstrap") for text in settings.bootstrap]
    inside: list[BaseException] = []
    try:
        async with _running_router(settings, bootstrap) as router:
            try:
                yield router
            except BaseException as error:
                inside.append(error)
                raise
    except BaseExceptionGroup as group:
        # A dozen nurseries of ours and the library's each put a wrapping around it.
        if inside and list(_leaves(group)) == inside:
            raise inside[0] from None
        raise


@asynccontextmanager
async def _running_router(settings: SwarmSettings, bootstrap: list[NodeAddress]) -> AsyncIterator[Libp2pRouter]:
    ips = await trio.to_thread.run_sync(announced_ips, settings.listen_host, settings.announce)
    with locked_data_dir(settings.data_dir):
        identity = await trio.to_thread.run_sync(load_or_create_identity, settings.data_dir)
        started_at_ms = await trio.to_thread.run_sync(_next_incarnation, settings.data_dir)
        listeners = await open_listeners(settings.listen_host, settings.data_port)
        async with AsyncExitStack() as stack:
            for listener in listeners:
                await stack.enter_async_context(listener)
            host = await stack.enter_async_context(
                open_host(identity, settings.listen_host, settings.libp2p_port, ips)
            )
            nursery = await stack.enter_async_context(trio.open_nursery())
            # On the way out, after what is entered below has been left: leaving that inside a cancelled scope would
            # put Cancelled in the place of the error that is on its way, and the nursery would swallow it.
            stack.callback(nursery.cancel_scope.cancel)
            router = Libp2pRouter(identity, host, nursery, started_at_ms)
            gossip = await stack.enter_async_context(
                open_gossip(
                    host,
                    nursery,
                    router.validate_gossip,
                    router.receive_gossip,
                    {MODELS: ENVELOPE_MAX, HEALTH: HEARTBEAT_MAX},
                )
            )
            router.start(gossip, listeners, ips, bootstrap)
            if settings.mdns and not is_loopback(settings.listen_host):
                nursery.start_soon(run_mdns, identity.node_id, ips, host.port, router.found_by_mdns)
            try:
                yield router
            finally:
                with trio.CancelScope(shield=True):
                    await router.stop()


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _parsed(texts: Iterable[str]) -> list[Address]:
    """The usable ones among addresses from another node."""
    addresses: list[Address] = []
    for text in texts:
        try:
            addresses.append(Address.parse(text))
        except InvalidRequest:
            log.debug("an unusable address was ignored")
    return addresses


def _next_incarnation(data_dir: Path) -> int:
    """When this life began, in ms, later than every life before it even where the clock was set back."""
    path = data_dir / _INCARNATION_NAME
    try:
        last_ms = int(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        last_ms = 0
    now_ms = max(time.time_ns() // 1_000_000, last_ms + 1)
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{now_ms}\n", "ascii")
    temporary.rename(path)
    return now_ms
