"""Collects the digests of a file's tensors that nodes send each other, and decides which of them to trust.

Pure.

Tensors are numbered in the order of their offsets. This node's own digests are the truth about its file. A
node that contradicts them has another file, or lies; where two other nodes contradict each other, this node
cannot know which one does. None of them is believed about any tensor, and nothing is put together while there
is a contradiction: a model made of two files would be a model that nobody made.

A span says which bytes of a file are there, and which are to be fetched next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from swarmllm_proto.file_digests import DigestRun
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import DIGEST_SIZE

Span = tuple[int, int]
"""[start, end)"""


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in the fewest spans, ascending."""
    found: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def missing(done: Iterable[Span], size_bytes: int) -> list[Span]:
    """What is not in `done` of [0, size_bytes), ascending."""
    left: list[Span] = []
    at = 0
    for start, end in joined(done):
        if start > at:
            left.append((at, min(start, size_bytes)))
        at = max(at, end)
    if at < size_bytes:
        left.append((at, size_bytes))
    return left


def cut(spans: Iterable[Span], piece_bytes: int) -> list[Span]:
    """In pieces of at most `piece_bytes`."""
    return [(at, min(at + piece_bytes, end)) for start, end in spans for at in range(start, end, piece_bytes)]


def n_bytes(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in joined(spans))


MAX_HEARD = 64
"""Nodes that are listened to about one file."""
HERE = NodeId("")
"""In place of a node id: this node."""


@dataclass(frozen=True, slots=True)
class DigestContradiction:
    tensor: int
    """The first one of which they say different things."""
    nodes: tuple[NodeId, ...]


@dataclass(slots=True)
class DigestBook:
    n_tensors: int
    own: dict[int, bytes] = field(default_factory=dict)
    heard: dict[NodeId, dict[int, bytes]] = field(default_factory=dict)

    def hear(self, node_id: NodeId, runs: Iterable[DigestRun]) -> bool:
        """What a node says now, in place of what it said before; returns whether that is news. Nonsense
        (tensors that the file does not have) counts as nothing."""
        said = digests_of(runs)
        if any(tensor >= self.n_tensors for tensor in said):
            said = {}
        before = self.heard.get(node_id, {})
        if said == before or (not before and len(self.heard) >= MAX_HEARD):
            return False
        if said:
            self.heard[node_id] = said
        else:
            del self.heard[node_id]
        return True

    def contradictions(self) -> tuple[DigestContradiction, ...]:
        """One for each group of nodes that are not believed."""
        against_own = self._against_own()
        found = [DigestContradiction(tensor, (HERE, node_id)) for node_id, tensor in against_own.items()]
        first: dict[tuple[NodeId, ...], int] = {}
        for tensor, said in sorted(self._said(without=against_own).items()):
            if len(said) > 1:
                nodes = tuple(sorted(node for nodes in said.values() for node in nodes))
                first.setdefault(nodes, tensor)
        return (*found, *(DigestContradiction(tensor, nodes) for nodes, tensor in first.items()))

    def known(self) -> dict[int, bytes]:
        """The digests that nobody here doubts."""
        doubted = {node_id for each in self.contradictions() for node_id in each.nodes}
        known: dict[int, bytes] = {}
        for node_id, said in self.heard.items():
            if node_id not in doubted:
                known |= said
        return known | self.own

    def missing(self) -> tuple[int, ...]:
        known = self.known()
        return tuple(tensor for tensor in range(self.n_tensors) if tensor not in known)

    def _against_own(self) -> dict[NodeId, int]:
        """Node -> the first tensor of which it says something else than this node has."""
        differing = {
            node_id: [tensor for tensor, digest in said.items() if self.own.get(tensor, digest) != digest]
            for node_id, said in self.heard.items()
        }
        return {node_id: min(tensors) for node_id, tensors in differing.items() if tensors}

    def _said(self, without: Collection[NodeId]) -> dict[int, dict[bytes, list[NodeId]]]:
        """Tensor -> digest -> which other nodes say so."""
        said: dict[int, dict[bytes, list[NodeId]]] = defaultdict(lambda: defaultdict(list))
        for node_id, digests in self.heard.items():
            if node_id not in without:
                for tensor, digest in digests.items():
                    said[tensor][digest].append(node_id)
        return said


def runs_of(digests: Mapping[int, bytes]) -> tuple[DigestRun, ...]:
    """The same, in the fewest runs."""
    runs = groupby(enumerate(sorted(digests)), key=lambda each: each[1] - each[0])
    grouped = [[tensor for _, tensor in run] for _, run in runs]
    return tuple(DigestRun(run[0], b"".join(digests[tensor] for tensor in run)) for run in grouped)


def digests_of(runs: Iterable[DigestRun]) -> dict[int, bytes]:
    return {
        run.first + at // DIGEST_SIZE: run.digests[at : at + DIGEST_SIZE]
        for run in runs
        for at in range(0, len(run.digests), DIGEST_SIZE)
    }
