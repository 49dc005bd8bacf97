"""A file of which each node fetches some layers because one of them shares it, before anyone knows the model.

The downloads, the stores and what the nodes tell each other are real; records come from a table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec
import trio
from blake3 import blake3
from deadlines import DEADLINE_S
from download_stand import GUIDE_DATA, SETTINGS, Stand, guide, open_stand
from faulty_server import FaultyServer

from swarmllm.downloads import PublishedModel
from swarmllm.errors import Conflict, ModelNotFound
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange
from swarmllm.node.placing.disk import PlacingDisk
from swarmllm.node.placing.share_book import ShareBook, open_share_book
from swarmllm.node.sharing.file_followers import KEPT_S, Followers, HubAccess
from swarmllm.node.sharing.file_shares import GONE_S, OUTDATED_S, SILENT_S, FileShares
from swarmllm.node.sharing.share_plan import SharePart, SharePlan
from swarmllm.node.sharing.sharing import Sharing
from swarmllm.swarm.in_memory.network import InMemoryNetwork, node_id_named
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import Digest, ModelId, NodeId, PublishedName
from swarmllm_proto.swarm import FetchedFile, FilePart, NodeCapability, NodeRecord, SharedFile

PATH = "/org/repo/resolve/main/guide.gguf"
SOURCE = PublishedName("hf:org/repo:guide.gguf")
HEADER = Digest(blake3(GUIDE_DATA[: min(tensor.offset for tensor in guide().tensors)]).hexdigest())
A, B, C = map(node_id_named, "abc")
ALL_BYTES = sum(tensor.size_bytes for tensor in guide().tensors)


class SharedAsUsual:
    """In place of what shares a known model."""

    def __init__(self, plan: SharePlan) -> None:
        self.plan = plan
        self.shared: list[tuple[str, str]] = []
        self.refuses = False

    async def plan_of(self, layout: object, may_take_part: object) -> SharePlan:
        return self.plan

    async def share(self, model_id: str, source: str) -> None:
        if self.refuses:
            raise Conflict("there is no room any more")
        self.shared.append((model_id, source))


@dataclass
class Member:
    node_id: NodeId
    stand: Stand
    book: ShareBook
    disk: PlacingDisk
    registry: Registry
    followers: Followers
    files: FileShares
    usual: SharedAsUsual

    def record(self) -> NodeRecord:
        capability = NodeCapability(accepts_shares_of=("members",), placing_free_disk_bytes=2**30)
        return NodeRecord(
            node_id=self.node_id,
            capability=capability,
            shared_files=self.files.shared,
            fetched_files=self.files.fetched,
        )


def thirds(*parts: tuple[NodeId, int, int]) -> SharePlan:
    taken = tuple(SharePart(node_id, (LayerRange(start, end),), 1, 1, 1) for node_id, start, end in parts)
    return SharePlan(ModelId("0" * 64), 1, True, taken, 1.0, 0.0, False, ())


PLAN = thirds((A, 0, 4), (B, 4, 8), (C, 8, 12))


class NoNames:
    def nickname_of(self, node_id: NodeId) -> str:
        return ""


@dataclass
class Kept:
    catalogue: Catalogue

    async def known(self, model_id: ModelId) -> CatalogueEntry:
        return await trio.to_thread.run_sync(self.catalogue.get, model_id)

    async def remove(self, name_or_id: str) -> None:
        raise ModelNotFound("nothing is removed here")


@asynccontextmanager
async def member(
    folder: Path, network: InMemoryNetwork, letter: str, hub: str, budget_bytes: int = 2**40
) -> AsyncIterator[Member]:
    settings = replace(SETTINGS, piece_bytes=2**20, endpoint=hub, token="secret")
    node_id = node_id_named(letter)
    (folder / letter).mkdir(exist_ok=True)
    async with open_stand(folder / letter, settings, network, node_id) as stand:
        book = await trio.to_thread.run_sync(open_share_book, folder / letter)
        disk = PlacingDisk(budget_bytes, book, Kept(stand.catalogue))
        registry, usual = Registry(node_id), SharedAsUsual(PLAN)
        followers = Followers(
            downloads=stand.downloads,
            gathering=stand.gathering,
            disk=disk,
            book=book,
            on_change=lambda: None,
        )
        files = FileShares(
            node_id,
            registry=registry,
            downloads=stand.downloads,
            gathering=stand.gathering,
            sharing=cast(Sharing, usual),
            followers=followers,
            accept=("members",),
            book=book,
            nicknames=NoNames(),
            on_change=lambda: None,
        )
        yield Member(node_id, stand, book, disk, registry, followers, files, usual)


async def gossip(*members: Member, now_s: float = 0.0, others: tuple[NodeRecord, ...] = ()) -> None:
    """Everybody hears everybody, and looks once."""
    records = [*(each.record() for each in members), *others]
    for each in members:
        each.registry.set_reachable({record.node_id for record in records} - {each.node_id})
        for record in records:
            each.registry.apply(record.node_id, encode_record(record))
    for each in members:
        await each.files.look(now_s)


async def settle(*members: Member, now_s: float = 0.0, others: tuple[NodeRecord, ...] = ()) -> None:
    """Until nothing is being fetched any more."""
    with trio.fail_after(DEADLINE_S):
        for _ in range(5):
            await gossip(*members, now_s=now_s, others=others)
            for each in members:
                for followed in each.followers.files.values():
                    if followed.download is not None:
                        await followed.download.ended.wait()


def offer(*parts: tuple[NodeId, int, int], header: str = HEADER) -> SharedFile:
    return SharedFile(
        source=SOURCE,
        name="big",
        header=Digest(header),
        size_bytes=len(GUIDE_DATA),
        parts=tuple(FilePart(node_id=n, start=start, end=end) for n, start, end in parts),
    )


def writer(*files: SharedFile) -> NodeRecord:
    return NodeRecord(node_id=C, shared_files=files or msgspec.UNSET)


async def test_nodes_that_fetch_a_third_each_share_the_model_that_it_turns_out_to_be(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, AsyncExitStack() as stack:
        a, b, c = [
            await stack.enter_async_context(member(tmp_path, network, each, web_server.url)) for each in "abc"
        ]
        await gossip(a, b, c)
        view = await a.files.share(SOURCE, "big", HubAccess())
        assert (view.model, view.model_id, view.n_layers) == ("big", "", 12)
        assert open_share_book(tmp_path / "a").files == a.book.files
        web_server.asked.clear()
        await settle(a, b, c)
        assert a.usual.shared == [(guide().model_id, SOURCE)]
        assert (b.usual.shared, c.usual.shared) == ([], [])
        assert a.files.views() == b.files.views() == ()
        assert a.book.files == b.book.followed == {}
        for each, layers in ((a, "0:4"), (b, "4:8"), (c, "8:12")):
            entry = each.stand.catalogue.resolve("big")
            assert entry.model_id == guide().model_id
            assert 0 < len(entry.present or ()) < len(guide().tensors)
            assert entry.present
            assert str(LayerRange.parse(layers))
        assert set(b.book.fetched) == {guide().model_id}, "it may go when its room is needed"
        assert a.book.fetched == {}, "the user of the first wanted it"
        last = len(GUIDE_DATA) - 1
        assert sum(span[1] >= last for span in web_server.spans(PATH)) == 1, "the end was fetched once"
        tokens = {asked.authorization for asked in web_server.asked}
        assert tokens == {"Bearer secret", None}, "only the first used its token"


async def test_a_node_without_room_says_so_and_fetches_no_layers(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "b", web_server.url, 1000) as b:
        await settle(b, others=(writer(offer((B, 0, 8), (C, 8, 12))),))
        (said,) = b.files.fetched or ()
        assert (said.state, said.layers) == ("failed", ())
        assert "auto_manage.max_disk_gib" in said.problem
        assert web_server.n_bytes < ALL_BYTES / 4
        assert b.disk.free_bytes == 1000
        await settle(b, others=(writer(),), now_s=KEPT_S + 1)
        assert b.stand.parts == []
        assert b.files.fetched == ()


async def test_a_file_with_another_header_is_not_fetched(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "b", web_server.url) as b:
        await settle(b, others=(writer(offer((B, 0, 8), header="ab" * 32)),))
        (said,) = b.files.fetched or ()
        assert "another header" in said.problem
        assert web_server.n_bytes < ALL_BYTES / 4
        assert b.stand.parts == []


async def test_layers_that_never_become_a_model_go_some_time_after_the_share(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network:
        async with member(tmp_path, network, "b", web_server.url) as b:
            await settle(b, others=(writer(offer((B, 0, 4), (C, 4, 12))),))
            (said,) = b.files.fetched or ()
            assert (said.state, said.layers) == ("done", ((0, 4),))
            assert b.disk.free_bytes < 2**40, "what waits takes room"
            assert b.files.view("big") is not None
        # It is known after a restart too that they are here for another node's sake.
        async with member(tmp_path, network, "b", web_server.url) as b:
            await settle(b, others=(writer(),), now_s=0.0)
            await settle(b, others=(writer(),), now_s=KEPT_S - 1)
            assert b.stand.parts
            await settle(b, others=(writer(),), now_s=KEPT_S + 1)
            assert b.stand.parts == []
            assert (b.book.followed, b.followers.files, b.disk.free_bytes) == ({}, {}, 2**40)


async def test_nobody_is_followed_who_is_not_accepted(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "b", web_server.url) as b:
        b.files._accept = (A,)
        await settle(b, others=(writer(offer((B, 0, 8))),))
        assert b.followers.files == {}
        assert web_server.n_bytes == 0


async def test_a_model_of_the_same_name_keeps_it(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[PATH] = GUIDE_DATA
    web_server.files["/big.gguf"] = web_server.files["/models/tiny-q8_0.gguf"]
    async with InMemoryNetwork() as network, member(tmp_path, network, "b", web_server.url) as b:
        await b.stand.fetch(f"{web_server.url}/big.gguf")
        await settle(b, others=(writer(offer((B, 0, 4))),))
        (view,) = b.stand.gathering.views()
        assert view.name == f"big-{HEADER[:8]}"


def says(node_id: NodeId, state: str, problem: str = "") -> NodeRecord:
    said = FetchedFile(header=HEADER, state=state, problem=problem)  # type: ignore[arg-type]
    capability = NodeCapability(accepts_shares_of=("members",))
    return NodeRecord(node_id=node_id, capability=capability, fetched_files=(said,))


async def test_the_layers_of_nodes_that_fail_are_silent_or_gone_go_to_another(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "a", web_server.url) as a:
        both = (says(B, "fetching"), says(C, "fetching"))
        await gossip(a, others=both)
        await a.files.share(SOURCE, "big", HubAccess())

        def asked() -> dict[NodeId, tuple[int, int]]:
            (file,) = a.files.shared or ()
            return {part.node_id: (part.start, part.end) for part in file.parts}

        await settle(a, others=both)
        assert asked() == {A: (0, 4), B: (4, 8), C: (8, 12)}
        silent = (NodeRecord(node_id=B), says(C, "fetching"))
        await gossip(a, others=silent, now_s=SILENT_S - 1)
        assert set(asked()) == {A, B, C}
        await gossip(a, others=silent, now_s=SILENT_S + 1)
        assert asked() == {A: (0, 8), C: (8, 12)}
        await settle(a, now_s=SILENT_S + 2)
        await gossip(a, now_s=SILENT_S + 1 + GONE_S - 1)
        assert set(asked()) == {A, C}
        await settle(a, now_s=SILENT_S + 2 + GONE_S)
        assert a.usual.shared == [(guide().model_id, SOURCE)], "the first fetched everything in the end"


async def test_a_share_that_nobody_can_carry_out_says_why(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "a", web_server.url) as a:
        await gossip(a, others=(says(B, "fetching"), says(C, "fetching")))
        await a.files.share(SOURCE, "big", HubAccess())
        web_server.files.clear()
        others = (says(B, "failed", "no room"), says(C, "fetching"))
        await settle(a, others=others)
        view = a.files.view("big")
        assert view is not None
        assert "nobody can fetch the rest of it" in view.problem
        assert "no room" in view.problem
        assert a.files.shared is msgspec.UNSET
        assert await a.files.unshare("big") is not None
        assert await a.files.unshare("big") is None
        assert a.book.files == {}


async def test_a_known_model_is_shared_again_later_where_there_was_no_room(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "a", web_server.url) as a:
        a.usual.plan = thirds((A, 0, 11), (B, 11, 12))
        await gossip(a, others=(says(B, "fetching"),))
        await a.files.share(SOURCE, "big", HubAccess())
        a.usual.refuses = True
        await settle(a, others=(says(B, "failed"),))
        view = a.files.view("big")
        assert view is not None
        assert view.problem == "", "records may be older than what nodes have fetched"
        await settle(a, now_s=OUTDATED_S + 1)
        view = a.files.view("big")
        assert view is not None
        assert view.problem == "there is no room any more"
        a.usual.refuses = False
        await settle(a, now_s=OUTDATED_S + SILENT_S + 2)
        assert a.usual.shared == [(guide().model_id, SOURCE)]


async def test_what_cannot_be_spread_is_refused(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[PATH] = GUIDE_DATA
    async with InMemoryNetwork() as network, member(tmp_path, network, "a", web_server.url) as a:
        found = await a.stand.downloads.published(SOURCE)
        assert isinstance(found, PublishedModel)
        assert (found.header, found.source) == (HEADER, SOURCE)
        assert await a.files.plan(found) is not None
        foreign = replace(found, layout=msgspec.structs.replace(found.layout, architecture="unheard-of"))
        assert await a.files.plan(foreign) is None
        assert await a.files.plan(replace(found, source=PublishedName(""))) is None
        a.usual.plan = thirds((A, 0, 12))
        assert await a.files.plan(found) is None
