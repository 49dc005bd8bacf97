"""A model that waits for its id: some layers of a file are here, digests of the others are not known yet.

A folder per address holds it: `layers.gguf`, sparse, in the layout of the file, with the header and the
tensors that were fetched, and `layers.json`, which says what of it counts, of which version of which file it
is, and what other nodes said of it. That is written after the bytes are on the disk, so a process killed at
any moment loses the bytes on their way and nothing else.

Methods that touch the disk block, except for `save`; call them in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec
import trio
from blake3 import blake3

from swarmllm.downloads.digest_book import HERE, DigestBook, DigestContradiction, runs_of
from swarmllm.downloads.remote import RemoteFileInfo
from swarmllm.errors import BadModel, reason_of
from swarmllm.models import CatalogueEntry, LayerRange, Manifest, TensorEntry, merge, needed_tensors
from swarmllm.models.gguf_header import GgufHeader, read_header
from swarmllm.models.hashing import manifest_of
from swarmllm_proto.file_digests import DigestRun, FetchDigests, Runs
from swarmllm_proto.identifiers import Digest, NodeId

log = logging.getLogger(__name__)

PART, STATE_FILE = "layers.gguf", "layers.json"
UNKNOWN = "0" * 64
"""In place of a digest where only the layout of a model matters."""


class PartialModelState(msgspec.Struct, kw_only=True):
    url: str
    source: str
    """As it was asked for; an address may carry what is nobody's business."""
    name: str
    size_bytes: int
    validator: str
    sha256: str
    layers: list[str] = []
    """All that were asked for, each as "0:4"."""
    digests: dict[str, str] = {}
    """Tensors that are there -> BLAKE3."""
    begun: dict[str, int] = {}
    """Tensors of which some first bytes are there -> how many."""
    heard: dict[NodeId, Runs] = {}


class UnidentifiedModel:
    def __init__(self, folder: Path, state: PartialModelState) -> None:
        self.folder = folder
        self.state = state
        self.layout: Manifest | None = None
        """Every tensor and its place; None until the header is there."""
        self.tensors: tuple[TensorEntry, ...] = ()
        """In the order of their offsets."""
        self.header_digest = ""
        self.book = DigestBook(0)
        self.is_fetching = False
        self.entry: CatalogueEntry | None = None
        """The model that it turned out to be."""
        self._saving = trio.Lock()

    def __repr__(self) -> str:
        return f"<UnidentifiedModel {self.name} {', '.join(map(str, self.held))}>"

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def part(self) -> Path:
        return self.folder / PART

    @property
    def held(self) -> tuple[LayerRange, ...]:
        """The layers that are here with all they need."""
        wanted = [LayerRange.parse(text) for text in self.state.layers]
        return merge(layers for layers in wanted if not self.missing_of(layers))

    def missing_of(self, layers: LayerRange) -> tuple[TensorEntry, ...]:
        """What is not here of what `layers` need. Raises BadModel for layers that the model has not."""
        if self.layout is None:
            raise BadModel(f"the header of {self.name} is not here yet")
        if layers not in self.layout.whole:
            raise BadModel(f"{self.name} has layers {self.layout.whole}, not {layers}", field="layers")
        needed = needed_tensors(self.layout, layers)
        return tuple(tensor for tensor in needed if tensor.name not in self.state.digests)

    def question(self, known: tuple[DigestRun, ...] = ()) -> FetchDigests:
        """What other nodes are asked."""
        state = self.state
        return FetchDigests(
            header=Digest(self.header_digest),
            size_bytes=state.size_bytes,
            sha256=Digest(state.sha256) if state.sha256 else None,
            known=known,
        )

    def is_about(self, question: FetchDigests) -> bool:
        mine = self.question()
        return (mine.header, mine.size_bytes, mine.sha256) == (
            question.header,
            question.size_bytes,
            question.sha256,
        )

    def own_runs(self) -> tuple[DigestRun, ...]:
        return runs_of(self.book.own)

    def all_digests(self, here: dict[int, bytes] | None = None) -> dict[str, str] | None:
        """Tensor -> BLAKE3, of every one; None as long as some are not known, or nodes contradict each other:
        then there are two files with one header, and who speaks of which is anybody's guess. `here`: of a
        file of this machine that looks the same."""
        known = self.book.known() if not self.book.contradictions() else {}
        if here is not None and here.items() >= self.book.own.items():
            known = here
        if not self.tensors or len(known) < len(self.tensors):
            return None
        return {tensor.name: known[place].hex() for place, tensor in enumerate(self.tensors)}

    def waits_for(self) -> str:
        """What is not known yet, in words."""
        missing = {self.tensors[place].name for place in self.book.missing()}
        shards = [
            shard
            for shard in (self.layout.shards if self.layout else ())
            if any(tensor.name in missing for tensor in shard.tensors)
        ]
        layers = merge(LayerRange(shard.index, shard.index + 1) for shard in shards if shard.kind == "layer")
        parts = [f"layers {', '.join(map(str, layers))}"] if layers else []
        parts += [shard.kind for shard in shards if shard.kind != "layer"]
        return f"the hashes of {', '.join(parts)}" if parts else "nodes that contradict each other to agree"

    def contradictions(self, node_id: NodeId) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(tensor, the nodes that say different things of it); `node_id`: this node."""

        def named(each: DigestContradiction) -> tuple[str, ...]:
            return tuple(node_id if node == HERE else node for node in each.nodes)

        return tuple((self.tensors[each.tensor].name, named(each)) for each in self.book.contradictions())

    def learn_layout(self) -> None:
        """From the header that is in the file. Raises BadModel where it is none, or not whole yet."""
        with self.part.open("rb") as file:
            header = read_header(file)
            digests = {tensor.name: UNKNOWN for tensor in header.tensors}
            layout = manifest_of(file, header, digests, self.name)
            file.seek(0)
            self.header_digest = blake3(file.read(header_bytes(header))).hexdigest()
        self.layout, self.tensors = layout, _in_order(layout, header)
        self.book = DigestBook(len(self.tensors))
        for tensor, digest in self.state.digests.items():
            self.has(tensor, digest)
        for node_id, runs in self.state.heard.items():
            self.book.hear(node_id, runs)

    def has(self, tensor: str, digest: str) -> None:
        """The tensor's bytes are on the disk."""
        self.state.digests[tensor] = digest
        self.state.begun.pop(tensor, None)
        places = [place for place, each in enumerate(self.tensors) if each.name == tensor]
        self.book.own |= {place: bytes.fromhex(digest) for place in places}

    def hear(self, node_id: NodeId, runs: Iterable[DigestRun]) -> bool:
        """Whether that is news, which then should be saved."""
        if not self.book.hear(node_id, runs):
            return False
        self.state.heard = {node: runs_of(said) for node, said in self.book.heard.items()}
        return True

    async def save(self) -> None:
        """What is noted now; what it says is there must be on the disk."""
        async with self._saving:
            await trio.to_thread.run_sync(self._write, msgspec.json.encode(self.state))

    def _write(self, state: bytes) -> None:
        temporary = self.folder / f"{STATE_FILE}.tmp"
        temporary.write_bytes(state)
        temporary.replace(self.folder / STATE_FILE)

    def begin(self) -> None:
        """An empty folder with a hole as large as the file."""
        self.forget()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.part.open("wb") as file:
            file.truncate(self.state.size_bytes)
        self._write(msgspec.json.encode(self.state))

    def forget(self) -> None:
        for name in (PART, STATE_FILE):
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def is_of(self, url: str, facts: RemoteFileInfo) -> bool:
        """Whether what is here belongs to this version of the file."""
        state = self.state
        return (state.url, state.size_bytes, state.validator) == (url, facts.size_bytes, facts.validator)


def read_waiting(folder: Path) -> UnidentifiedModel | None:
    """What an earlier attempt has left in a folder, if that can be used."""
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=PartialModelState)
        model = UnidentifiedModel(folder, state)
        if model.part.stat().st_size != state.size_bytes:
            return None
        if state.digests:
            model.learn_layout()
    except (OSError, msgspec.DecodeError, BadModel, ValueError, RecursionError) as error:
        if (folder / STATE_FILE).exists():
            log.info("what is in %s cannot be used: %s", folder, reason_of(error))
        return None
    return model


def header_bytes(header: GgufHeader) -> int:
    """Of the file up to its first tensor: what makes two files alike for nodes that pool digests."""
    return header.tensors[0].offset if header.tensors else header.data_offset


def _in_order(layout: Manifest, header: GgufHeader) -> tuple[TensorEntry, ...]:
    by_name = {tensor.name: tensor for tensor in layout.tensors}
    return tuple(by_name[tensor.name] for tensor in header.tensors)
