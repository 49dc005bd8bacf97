"""Who holds which layers of which model: what a node makes of the records it hears.

Pure state. Two things flow in: records (what nodes say about themselves) and the set of connected nodes (what
this node knows about liveness); everything that comes out is restricted to nodes that are connected now,
because a record outlives its writer. Which record of a node is the newest is the router's business: the one
applied last counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarmllm.models.layers import LayerRange
from swarmllm.swarm.prefix_index import PrefixIndex, PrefixMatch
from swarmllm_proto.codec import decode_record
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.swarm import FileAnnounce, NodeRecord, ShardAnnounce


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One contiguous range that one connected node (or this one) has ready to run."""

    layers: LayerRange
    node_id: str


@dataclass(frozen=True, slots=True)
class SwarmModel:
    """A model of which connected nodes hold layers, or have files to give."""

    model_id: str
    name: str
    n_layers: int
    holders: tuple[Holder, ...]


class Registry:
    def __init__(
        self,
        node_id: str,
        may_work: Callable[[str], bool] = lambda node_id: True,
        may_share: Callable[[str], bool] = lambda node_id: True,
    ) -> None:
        """`may_work(node_id)`: whether what that node offers counts (see trust.py); `may_share(node_id)`:
        whether what it says of kept KV does."""
        self._node_id = node_id
        self._may_work = may_work
        self._may_share = may_share
        self._prefixes = PrefixIndex()
        self._records: dict[str, NodeRecord] = {}
        self._connected: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Registry records={len(self._records)} connected={len(self._connected)}>"

    def apply(self, node_id: str, record: bytes) -> NodeRecord:
        """Take over what `node_id` says about itself; a bad record leaves its last good one in place.

        Raises swarmllm_proto.errors.ProtocolError, naming the field: undecodable, or another node's.
        """
        decoded = decode_record(record)
        if decoded.node_id != node_id:
            raise BadMessage("node_id", f"{node_id} may not write the record of {decoded.node_id}")
        self._records[node_id] = decoded
        self._prefixes.put(node_id, decoded.prefix_caches)
        return decoded

    def forget(self, node_id: str) -> None:
        self._records.pop(node_id, None)
        self._prefixes.forget(node_id)

    def set_connected(self, node_ids: Iterable[str]) -> None:
        self._connected = frozenset(node_ids)

    def connected(self) -> frozenset[str]:
        return self._connected

    def node(self, node_id: str) -> NodeRecord | None:
        """The last record heard of a node, connected or not."""
        return self._records.get(node_id)

    def trusted_nodes(self) -> dict[str, NodeRecord]:
        """Every record heard of this node and of those that may work, connected or not."""
        return {
            node_id: record
            for node_id, record in self._records.items()
            if node_id == self._node_id or self._may_work(node_id)
        }

    def nodes(self) -> dict[str, NodeRecord]:
        """Every record heard, connected or not."""
        return dict(self._records)

    def holders(self, model_id: str) -> list[Holder]:
        """Ranges that are ready on connected nodes and this one, ordered by range, then node id."""
        return sorted(
            Holder(LayerRange(start, end), node_id)
            for node_id, announced in self._announced()
            if announced.model_id == model_id
            for start, end in announced.ranges
        )

    def models(self) -> dict[str, SwarmModel]:
        """What connected nodes and this one hold or have files of, by model id.

        The id fixes the number of layers, so holders can only disagree about it when one lies or errs: this
        node's own word wins, else the most frequent. Names are free: same rule.
        """
        said: dict[str, Counter[tuple[str, int]]] = {}
        everything: list[tuple[str, ShardAnnounce | FileAnnounce]]
        everything = [*self._announced(), *self._announced_files()]
        for node_id, announced in everything:
            weight = len(self._records) + 1 if node_id == self._node_id else 1
            said.setdefault(announced.model_id, Counter())[announced.name, announced.n_layers] += weight
        models: dict[str, SwarmModel] = {}
        for model_id, votes in said.items():
            (name, n_layers), _ = min(votes.items(), key=lambda vote: (-vote[1], vote[0]))
            holders = tuple(h for h in self.holders(model_id) if h.layers.end <= n_layers)
            models[model_id] = SwarmModel(model_id, name, n_layers, holders)
        return models

    def files(self) -> dict[str, dict[str, FileAnnounce]]:
        """What other connected nodes have files of: model id -> node id -> what it said."""
        files: dict[str, dict[str, FileAnnounce]] = {}
        for node_id, announced in self._announced_files():
            if node_id != self._node_id:
                files.setdefault(announced.model_id, {})[node_id] = announced
        return files

    def holders_of_prefix(self, model_id: str, hashes: Sequence[bytes]) -> PrefixMatch:
        """The longest beginning of a prompt, whose complete blocks have these hashes, of which other
        connected nodes that are trusted enough announce the KV, and those nodes."""
        return self._prefixes.longest(model_id, hashes, self._shares)

    def n_prefixes(self, node_id: str) -> int:
        """Prompts' beginnings of which that node announces the KV; 0 where its word does not count."""
        return self._prefixes.count(node_id) if self._shares(node_id) else 0

    def _shares(self, node_id: str) -> bool:
        return node_id != self._node_id and self._counts(node_id) and self._may_share(node_id)

    def _announced_files(self) -> Iterable[tuple[str, FileAnnounce]]:
        for node_id, record in self._records.items():
            if self._counts(node_id):
                for announced in record.files:
                    yield node_id, announced

    def _announced(self) -> Iterable[tuple[str, ShardAnnounce]]:
        for node_id, record in self._records.items():
            if self._counts(node_id):
                for announced in record.models:
                    yield node_id, announced

    def _counts(self, node_id: str) -> bool:
        return node_id == self._node_id or (node_id in self._connected and self._may_work(node_id))
