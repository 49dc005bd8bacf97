"""Layers of a shared model from a hub, beside the nodes that have them: a wrong name gains nothing."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from deadlines import DEADLINE_S
from faulty_server import FaultyServer, Handler, open_shelf, well
from gguf_parts import LLAMA, gguf_bytes
from node_ids import A, B, node_id_named
from split_gguf import split_gguf

from swarmllm.downloads.published_files import HEADER_ROOM_BYTES, PublishedFiles, published_name
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.errors import NodeUnreachable
from swarmllm.models import CatalogueEntry, LayerRange, needed_tensors
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import ModelId, PublishedName
from swarmllm_proto.swarm import FetchPiece, NodeRecord, Piece, SharedModel

from .transfer_nodes import MODEL, SETTINGS, TENSOR_BYTES, WHOLE, Node, World, open_world

TAKER = node_id_named("taker")
NAME = "hf:ORG/REPO:tiny.gguf"
PATH = "/ORG/REPO/resolve/main/tiny.gguf"
LANES = SETTINGS.lanes_per_holder


@pytest.fixture
def web_server() -> Iterator[FaultyServer]:
    with open_shelf() as web_server:
        web_server.files[PATH] = MODEL
        yield web_server


def files_on(web_server: FaultyServer, **settings: Any) -> PublishedFiles:
    told = DownloadSettings(endpoint=web_server.url, token="secret", **settings)
    return PublishedFiles(told)


async def gives_no_tensors(request: FetchPiece, piece: Piece) -> Piece:
    return Piece(status="absent") if request.part == "tensor" else piece


async def two_nodes(world: World, **how: Any) -> tuple[Node, Node]:
    giver = await world.node(A, has_model=True)
    return giver, await world.node(TAKER, **how)


def is_whole(entry: CatalogueEntry) -> bool:
    return entry.path.read_bytes() == MODEL


async def test_a_hub_gives_the_layers_that_are_needed_and_nothing_else(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_world(tmp_path) as world:
        giver, taker = await two_nodes(world)
        giver.twist = gives_no_tensors
        published = files_on(web_server).named([(A, NAME)])
        entry = await taker.get(LayerRange(0, 1), published=published)
        needed = needed_tensors(entry.manifest, LayerRange(0, 1))
        assert entry.absent(needed) == ()
        assert web_server.n_bytes == sum(tensor.size_bytes for tensor in needed) + 1
        assert not any(asked.authorization for asked in web_server.asked), (
            "this node's token is for its own user"
        )
        assert taker.transfer.statistics().fetched_bytes >= web_server.n_bytes - 1
        giver.twist = None
        assert is_whole(await taker.transfer.ensure(entry, WHOLE, lambda done, total: None, origin=True))


async def test_a_hub_and_a_node_give_one_model_and_nothing_twice(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_world(tmp_path) as world:
        _, taker = await two_nodes(world)
        entry = await taker.get(published=files_on(web_server).named([(A, NAME)]))
        assert is_whole(entry)
        assert 10 * TENSOR_BYTES < taker.transfer.statistics().fetched_bytes < len(MODEL) + 4096


async def test_layers_come_from_the_parts_of_a_model(tmp_path: Path, web_server: FaultyServer) -> None:
    (tmp_path / "whole.gguf").write_bytes(MODEL)
    parts = split_gguf(tmp_path / "whole.gguf", tmp_path, [0, 3, 7], stem="tiny-Q8_0")
    del web_server.files[PATH]
    for part in parts:
        web_server.files[f"/ORG/REPO/resolve/main/{part.name}"] = part.read_bytes()
    async with open_world(tmp_path) as world:
        giver = await world.node(A)
        giver.store.catalogue.add(parts[0], "tiny")
        await world.settle()
        giver.twist = gives_no_tensors
        taker = await world.node(TAKER)
        published = files_on(web_server).named([(A, f"hf:ORG/REPO:{parts[0].name}")])
        entry = await taker.get(LayerRange(1, 2), published=published)
        assert entry.absent(needed_tensors(entry.manifest, LayerRange(1, 2))) == ()


def other_bytes(web_server: FaultyServer) -> None:
    web_server.files[PATH] = bytes(len(MODEL))


def a_huge_file(web_server: FaultyServer) -> None:
    web_server.files[PATH] = MODEL + bytes(len(MODEL))


def a_page(web_server: FaultyServer) -> None:
    web_server.files[PATH] = b"welcome"


WRONG = {"other bytes": other_bytes, "a huge file": a_huge_file, "a page": a_page}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
async def test_a_wrong_file_costs_a_tensor_per_lane_and_names_who_named_it(
    tmp_path: Path,
    web_server: FaultyServer,
    wrong: Callable[[FaultyServer], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong(web_server)
    caplog.set_level(logging.INFO, "swarmllm.transfer")
    async with open_world(tmp_path) as world:
        giver, taker = await two_nodes(world, settings=replace(SETTINGS, piece_timeout_s=DEADLINE_S))
        files, refused = files_on(web_server), trio.Event()
        (named,) = files.named([(B, NAME)])

        def refuse() -> None:
            named.refuse()
            refused.set()

        async def when_refused(request: FetchPiece, piece: Piece) -> Piece:
            if request.part == "tensor":
                await refused.wait()
            return piece

        giver.twist = when_refused
        entry = await taker.get(LayerRange(0, 1), published=[replace(named, refuse=refuse)])
        assert entry.absent(needed_tensors(entry.manifest, LayerRange(0, 1))) == ()
        assert web_server.n_bytes <= LANES * TENSOR_BYTES + 1
        said = [text for text in caplog.messages if "is not the file of tiny" in text]
        assert len(said) == 1
        assert B in said[0]
        assert files.named([(B, "hf:ORG/REPO:another.gguf")]) == (), "it is believed again"
        assert files.named([(A, NAME)]), "it is somebody else's fault"
        assert taker.transfer.statistics().liars == []


async def test_no_more_is_read_of_headers_than_those_of_the_model_take(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    name = "tiny-{}-of-00002.gguf"
    other = gguf_bytes({**LLAMA, "general.description": "x" * 2**23}, {})
    for number in ("00001", "00002"):
        web_server.files[f"/ORG/REPO/resolve/main/{name.format(number)}"] = other
    async with open_world(tmp_path) as world:
        giver, taker = await two_nodes(world)
        giver.twist = gives_no_tensors
        published = files_on(web_server).named([(A, f"hf:ORG/REPO:{name.format('00001')}")])
        with pytest.raises(NodeUnreachable):
            await taker.get(published=published)
    assert web_server.n_bytes < HEADER_ROOM_BYTES + 2**20


class StoppingHub:
    """It begins every answer but the first, and ends none."""

    def __init__(self, web_server: FaultyServer) -> None:
        self.over, self.asked = threading.Event(), trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        web_server.faults.extend([well] + [self._stop] * 64)

    def _stop(self, handler: Handler, data: bytes) -> None:
        start, end = handler.span() or (0, len(data))
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        handler.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        handler.send_header("Content-Length", str(end - start))
        handler.end_headers()
        handler.wfile.write(data[start : start + 4096])
        self._token.run_sync_soon(self.asked.set)
        self.over.wait(DEADLINE_S)
        handler.reset()


async def test_nodes_take_over_what_a_hub_that_stops_was_to_give(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    hub = StoppingHub(web_server)

    async def when_asked(request: FetchPiece, piece: Piece) -> Piece:
        if request.part == "tensor":
            await hub.asked.wait()
        return piece

    try:
        async with open_world(tmp_path) as world:
            giver, taker = await two_nodes(world, settings=replace(SETTINGS, piece_timeout_s=1e9))
            giver.twist = when_asked
            entry = await taker.get(published=files_on(web_server).named([(A, NAME)]))
            assert is_whole(entry)
    finally:
        hub.over.set()


async def test_a_hub_that_stops_is_given_up_where_nobody_else_has_it(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    hub = StoppingHub(web_server)
    try:
        async with open_world(tmp_path) as world:
            giver, taker = await two_nodes(world, settings=replace(SETTINGS, piece_timeout_s=0.2))
            giver.twist = gives_no_tensors
            with pytest.raises(NodeUnreachable, match="could not be had"):
                await taker.get(published=files_on(web_server).named([(A, NAME)]))
    finally:
        hub.over.set()


async def test_where_the_hub_has_another_file_and_nobody_gives_it_the_fetch_fails(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    other_bytes(web_server)
    async with open_world(tmp_path) as world:
        giver, taker = await two_nodes(world)
        giver.twist = gives_no_tensors
        with pytest.raises(NodeUnreachable, match="could not be had"):
            await taker.get(published=files_on(web_server).named([(A, NAME)]))
        giver.twist = None
        assert is_whole(await taker.get())


async def test_a_mistake_in_reading_a_hub_costs_its_help_only(
    tmp_path: Path, web_server: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    (named,) = files_on(web_server).named([(A, NAME)])

    def broken(entry: CatalogueEntry) -> AbstractAsyncContextManager[Any]:
        raise RuntimeError("a mistake")

    async with open_world(tmp_path) as world:
        _, taker = await two_nodes(world)
        assert is_whole(await taker.get(published=[replace(named, open=broken)]))
    assert "a mistake" in caplog.text


async def test_a_hub_alone_is_not_asked_for_what_nobody_can_vouch_for(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_world(tmp_path) as world:
        _, taker = await two_nodes(world)
        entry = await taker.transfer.find("tiny")
        world.network.kill(A)
        await world.settle()
        with pytest.raises(NodeUnreachable):
            await taker.transfer.ensure(
                entry, WHOLE, lambda done, total: None, published=files_on(web_server).named([(A, NAME)])
            )
        assert web_server.asked == []


async def test_an_offline_node_asks_no_hub(web_server: FaultyServer) -> None:
    assert files_on(web_server, offline=True).named([(A, NAME)]) == ()


async def test_two_names_are_tried_in_one_fetch(web_server: FaultyServer) -> None:
    named = files_on(web_server).named([(A, NAME), (B, NAME), (A, f"{NAME}.gguf"), (B, "hf:ORG/REPO:c.gguf")])
    assert [(each.said_by, each.text) for each in named] == [(A, NAME), (A, f"{NAME}.gguf")]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://hub/ORG/REPO/resolve/main/a-b_C.gguf", "hf:ORG/REPO:a-b_C.gguf"),
        ("https://hub/ORG/REPO/resolve/main/Q4/x%2By.gguf", "hf:ORG/REPO:Q4/x+y.gguf"),
        ("https://hub/ORG/REPO/resolve/main/caf%C3%A9.gguf", ""),
        ("https://other/ORG/REPO/resolve/main/x.gguf", ""),
        ("https://hub/ORG/REPO/resolve/main/../x.gguf", ""),
    ],
)
def test_what_others_are_told_of_a_file(url: str, name: str) -> None:
    assert published_name(url, "https://hub") == name


@pytest.mark.parametrize(
    "source",
    [
        "https://example.org/x.gguf",
        "hf:ORG/REPO",
        "hf:ORG/REPO:x.bin",
        "hf:ORG/REPO:../../api/x.gguf",
        "hf:../REPO:x.gguf",
        "hf:ORG/REPO:x.gguf?a",
        "hf:ORG/REPO:x.gguf#a",
        "hf:ORG/REPO:x@evil.gguf",
        "hf:ORG/REPO:x\ny.gguf",
        "hf:ORG/REPO:x.gguf\n",
        "hf:ORG/REPO:\u202egguf.x.gguf",
        f"hf:ORG/REPO:{'x' * 600}.gguf",
    ],
)
def test_a_record_with_an_odd_source_is_refused_by_the_name_of_the_field(source: str) -> None:
    share = SharedModel(model_id=ModelId("1" * 64), name="m", source=PublishedName(source))
    with pytest.raises(ProtocolError, match="source"):
        decode_record(encode_record(NodeRecord(node_id=A, shares=(share,))))
