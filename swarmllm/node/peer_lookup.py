"""The other nodes as people ask for them: by id, by the end of it, or by nickname."""

from __future__ import annotations

from swarmllm.errors import InvalidRequest
from swarmllm.node.views import PeerDetails, PeerView
from swarmllm.swarm.peers.trust import Deed
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import NodeId

ID_END_MIN = 6
"""Characters of a node id's end that stand for it; the start is the same for all."""


class PeerLookup:
    def __init__(self, router: Router, registry: Registry, trust: Trust) -> None:
        self._router = router
        self._registry = registry
        self._trust = trust

    def peers(self) -> tuple[PeerView, ...]:
        """The connected ones."""
        return tuple(
            PeerView(
                info,
                self._registry.node(info.node_id),
                self._trust.score(info.node_id),
                self._trust.count(info.node_id, Deed.DAMAGED),
                self._registry.n_prefixes(info.node_id),
            )
            for info in self._router.peers()
        )

    def show(self, name: str) -> PeerDetails:
        """Everything about one node, connected or not. Raises InvalidRequest where the name means none, or
        several."""
        node_id = self._find(name.removeprefix("…"))
        connected = {view.info.node_id: view for view in self.peers()}
        return PeerDetails(
            node_id, connected.get(node_id), self._registry.node(node_id), self._trust.explain(node_id)
        )

    def _find(self, name: str) -> NodeId:
        records = self._registry.nodes()
        known = {*records, *self._router.connected(), *self._trust.known()} - {self._router.node_id}
        if name in known:
            return NodeId(name)
        named = [n for n in known if (record := records.get(n)) is not None and record.nickname == name]
        if not named and len(name) >= ID_END_MIN:
            named = [n for n in known if n.endswith(name)]
        if len(named) == 1:
            return named[0]
        if named:
            raise InvalidRequest(f"{len(named)} nodes are called {name!r}: use a node id.", field="peer")
        raise InvalidRequest(f"No node {name!r} is known here; see swarmllm peers.", field="peer")
