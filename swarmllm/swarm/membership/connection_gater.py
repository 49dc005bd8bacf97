"""Decides which nodes this node talks to, once per connection, on both planes, before any other protocol
runs.

Right after the Noise handshake, when both ends know each other's proven node id:

1. A node that the settings do not let in is left there.
2. In a private swarm both prove that they know the network's key, the one that dialled first: it sends
   KEYS_MAX proofs (those of its keys, filled up with random bytes), the other looks for one it can check
   and answers with its own for the same key. A proof is BLAKE3, keyed with the network's key, over the role
   and the handshake's hash, which is different for every connection and contains both identities: it cannot
   be replayed, reflected or passed on.

A node that cannot prove it learns the node id, which the handshake tells, and sees the connection closed. No
protocol is negotiated with it. libp2p's own pre-shared keys were rejected: they fail slowly and interoperate
with nobody.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

import trio
from blake3 import blake3
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.transport import Transport as Noise

from swarmllm.errors import ConfigError
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.membership.network_key import KEYS_MAX, OPEN_SWARM, Network, NetworkFile
from swarmllm.swarm.peers.connection_limits import ADMIT_ALL, ConnectionAdmission, Standing
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId, is_node_id

log = logging.getLogger(__name__)

PROOF_BYTES = 32
PROOF_S = 5.0

_DIALLER, _LISTENER = b"\0", b"\1"
_CONTEXT = "swarmllm 2026 proof of membership"


class ConnectionGated(HandshakeFailure):  # type: ignore[misc]
    """The gater refuses the peer. libp2p treats this as a failed handshake and closes the connection."""


class ConnectionGater:
    """`peers` holds the key that each has proved to know. `clock` is in seconds since the epoch."""

    def __init__(
        self,
        network: Network = OPEN_SWARM,
        admission: ConnectionAdmission = ADMIT_ALL,
        *,
        file: NetworkFile | None = None,
        peers: Parts[bytes] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._admission = admission
        self._file = file
        self._seen = file.state() if file else None
        self._clock = clock
        self._proved_with: Parts[bytes] = Parts.alone() if peers is None else peers

    @property
    def network_id(self) -> str:
        return self._network.network_id

    def lets_in(self, node_id: NodeId) -> bool:
        return self._admission.lets_in(node_id)

    def standing(self, node_id: NodeId) -> Standing:
        return self._admission.standing(node_id)

    def refresh(self) -> None:
        """Take over keys that were changed since; blocking. Another network's are for the next start."""
        if self._file is None or self._file.state() == self._seen:
            return
        self._seen = self._file.state()
        try:
            network = self._file.read()
        except ConfigError as error:
            log.error("network keys not read: %s", error.message)  # noqa: TRY400 (the message says it all)
            return
        if network.network_id == self.network_id:
            self._network = network
            log.info("the network's keys were read again")
        else:
            log.warning("this node was told to belong to another network; it will after a restart")

    def outdated(self, connected: Collection[NodeId]) -> list[NodeId]:
        """Of the connected nodes, those whose proof was made with a key that is no longer accepted, or that
        are no longer let in. Forgets the proofs of all others."""
        accepted = self._network.accepted(self._clock())
        for node_id in [each for each in self._proved_with if each not in connected]:
            self._proved_with.drop(node_id)
        gone = [n for n, secret in self._proved_with.items() if secret not in accepted]
        return [*gone, *(n for n in connected if n not in gone and not self.lets_in(n))]

    async def check(self, session: Any, *, dialled: bool) -> None:
        """Raises ConnectionGated. The session is libp2p's, fresh from its handshake; closed on failure."""
        node_id = str(session.get_remote_peer())
        try:
            if not is_node_id(node_id):
                raise ConnectionGated("the peer's key is not Ed25519")
            if not self.lets_in(node_id):
                raise ConnectionGated(f"{node_id} is not let in")
            if self._network.is_private:
                with trio.fail_after(PROOF_S):
                    secret = await (self._prove_first(session) if dialled else self._prove_second(session))
                self._proved_with.put(node_id, secret)
        except ConnectionGated:
            await session.close()
            raise
        except Exception as error:
            await session.close()
            raise ConnectionGated(f"no proof of membership: {type(error).__name__}") from error

    async def _prove_first(self, session: Any) -> bytes:
        handshake = _handshake_hash(session)
        accepted = self._network.accepted(self._clock())
        proofs = [proof(secret, _DIALLER, handshake) for secret in accepted]
        proofs += [secrets.token_bytes(PROOF_BYTES) for _ in range(KEYS_MAX - len(proofs))]
        await session.conn.write_msg(b"".join(proofs))
        answered: bytes = await session.conn.read_msg()
        for secret in accepted:
            if hmac.compare_digest(answered, proof(secret, _LISTENER, handshake)):
                return secret
        raise ConnectionGated("the proof of membership is wrong")

    async def _prove_second(self, session: Any) -> bytes:
        handshake = _handshake_hash(session)
        offered: bytes = await session.conn.read_msg()
        if len(offered) != KEYS_MAX * PROOF_BYTES:
            raise ConnectionGated("no proof of membership came")
        proofs = [offered[at : at + PROOF_BYTES] for at in range(0, len(offered), PROOF_BYTES)]
        for secret in self._network.accepted(self._clock()):
            expected = proof(secret, _DIALLER, handshake)
            if any(hmac.compare_digest(expected, given) for given in proofs):
                await session.conn.write_msg(proof(secret, _LISTENER, handshake))
                return secret
        raise ConnectionGated("the proof of membership is wrong")


class GuardedNoise(Noise):  # type: ignore[misc]
    """libp2p's Noise with the gater behind it; both planes make their connections with it."""

    def __init__(self, identity: Identity, gater: ConnectionGater) -> None:
        super().__init__(identity.key_pair, noise_privkey=create_x25519_key_pair().private_key)
        self._gater = gater

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        session = await super().secure_inbound(conn)
        await self._gater.check(session, dialled=False)
        return session

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        session = await super().secure_outbound(conn, peer_id)
        await self._gater.check(session, dialled=True)
        return session


def proof(secret: bytes, role: bytes, handshake_hash: bytes) -> bytes:
    key = blake3(secret, derive_key_context=_CONTEXT).digest()
    return blake3(role + handshake_hash, key=key).digest()


def _handshake_hash(session: Any) -> bytes:
    found: bytes = session.conn.noise_state.get_handshake_hash()
    return found
