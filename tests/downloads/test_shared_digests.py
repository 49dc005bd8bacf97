"""Some layers of a model on each of several nodes that do not know it: they find out together which it is."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import trio
from download_stand import GUIDE, GUIDE_DATA, guide
from faulty_server import FaultyServer
from guide_layers import (
    NAME,
    THIRDS,
    check_is_the_guide,
    eventually,
    header_bytes,
    open_node,
    open_stand,
    until,
    wanted,
)

from swarmllm.downloads.digest_book import n_bytes
from swarmllm.guide import GUIDE_PATH
from swarmllm.swarm.in_memory.network import InMemoryNetwork, node_id_named
from swarmllm_proto.codec import encode_response
from swarmllm_proto.file_digests import DigestRun, Digests
from swarmllm_proto.swarm import Piece


async def test_three_nodes_find_out_together_which_model_it_is(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with InMemoryNetwork() as network, AsyncExitStack() as stack:
        stands = {}
        downloads = []
        for name, layers in THIRDS.items():
            stands[name] = await stack.enter_async_context(open_node(tmp_path, network, name))
            download = await stands[name].fetch(web_server.url + GUIDE, layers=layers)
            assert (download.state, download.error) == ("done", "")
            downloads.append(download)
        assert download.view().waits_for == "", "the last one knows it at once"
        for name, layers in THIRDS.items():
            check_is_the_guide(await eventually(stands[name]), stands[name], layers)
        assert [each.view().waits_for for each in downloads] == ["", "", ""]
    layers_bytes = sum(n_bytes(wanted(layers)) for layers in THIRDS.values())
    assert web_server.n_bytes == 3 * (1 + header_bytes()) + layers_bytes


async def test_who_was_away_is_told_when_it_is_back(tmp_path: Path, web_server: FaultyServer) -> None:
    async with InMemoryNetwork() as network:
        async with open_node(tmp_path, network, "a") as first:
            await first.fetch(web_server.url + GUIDE, layers="0:4")
        async with (
            open_node(tmp_path, network, "b") as second,
            open_node(tmp_path, network, "c") as third,
        ):
            await second.fetch(web_server.url + GUIDE, layers="4:8")
            await third.fetch(web_server.url + GUIDE, layers="8:12")
            (view,) = third.gathering.views()
            assert view.waits_for == "the hashes of layers 0:4, embedding"
            web_server.files.clear()
            async with open_node(tmp_path, network, "a") as again:
                for stand, layers in ((again, "0:4"), (second, "4:8"), (third, "8:12")):
                    check_is_the_guide(await eventually(stand), stand, layers)


async def test_what_others_said_is_not_forgotten_when_they_leave(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with InMemoryNetwork() as network:
        async with open_node(tmp_path, network, "a") as first:
            await first.fetch(web_server.url + GUIDE, layers="0:4")
            async with open_node(tmp_path, network, "b") as second:
                await second.fetch(web_server.url + GUIDE, layers="4:8")
                await until(lambda: first.gathering.views()[0].waits_for == "the hashes of layers 8:12, head")
        async with open_node(tmp_path, network, "a") as first:
            (view,) = first.gathering.views()
            assert view.waits_for == "the hashes of layers 8:12, head"
            async with open_node(tmp_path, network, "c") as third:
                await third.fetch(web_server.url + GUIDE, layers="8:12")
                check_is_the_guide(await eventually(first), first, "0:4")
                (view,) = third.gathering.views()
                assert view.waits_for == "the hashes of layers 4:8", (
                    "nodes pass nothing on that they did not hash"
                )
                async with open_node(tmp_path, network, "b") as second:
                    check_is_the_guide(await eventually(third), third, "8:12")
                    check_is_the_guide(await eventually(second), second, "4:8")


async def test_one_node_with_the_whole_model_under_any_name_is_enough(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with (
        InMemoryNetwork() as network,
        open_node(tmp_path, network, "a") as holder,
        open_node(tmp_path, network, "b") as stand,
    ):
        holder.catalogue.add(GUIDE_PATH, "something-else")
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert (download.state, download.view().waits_for) == ("done", "")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "4:8")
        assert web_server.n_bytes == 1 + header_bytes() + n_bytes(wanted("4:8"))


async def test_contradictions_are_named_and_nothing_is_merged(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    """Two files that look the same in their header: a model of both would be one that nobody made."""
    tensor = next(t for t in guide().tensors if t.name == "blk.9.ffn_up.weight")
    damaged = bytearray(GUIDE_DATA)
    damaged[tensor.offset] ^= 1
    web_server.files["/other/guide-q8_0.gguf"] = bytes(damaged)
    async with InMemoryNetwork() as network, AsyncExitStack() as stack:
        stands = {}
        for name in "abcd":
            stands[name] = await stack.enter_async_context(open_node(tmp_path, network, name, reask_s=0.05))
        for name in "ac":
            await stands[name].fetch(web_server.url + GUIDE, layers=THIRDS[name])
        await stands["d"].fetch(web_server.url + "/other/guide-q8_0.gguf", layers="8:12")
        await stands["b"].fetch(web_server.url + GUIDE, layers=THIRDS["b"])
        await until(lambda: all(stands[name].gathering.views()[0].contradictions for name in "abcd"))
        for name in "ab":
            (view,) = stands[name].gathering.views()
            assert view.contradictions == (("blk.9.ffn_up.weight", (node_id_named("c"), node_id_named("d"))),)
            assert view.waits_for == "the hashes of layers 8:12, head"
        (view,) = stands["c"].gathering.views()
        assert view.contradictions == (("blk.9.ffn_up.weight", (node_id_named("c"), node_id_named("d"))),)
        assert view.waits_for == "nodes that contradict each other to agree"
        assert stands["c"].catalogue.list() == ()
        # Whoever has the wrong file removes it; then the others need nothing more.
        await stands["d"].gathering.remove(NAME)
        assert stands["d"].parts == []
        for name, layers in THIRDS.items():
            check_is_the_guide(await eventually(stands[name]), stands[name], layers)


async def test_a_node_that_is_not_trusted_says_nothing_that_counts(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with (
        InMemoryNetwork() as network,
        open_node(tmp_path, network, "a") as stand,
        open_node(tmp_path, network, "b", believes=()) as wary,
    ):
        await stand.fetch(web_server.url + GUIDE, layers="0:4")
        await wary.fetch(web_server.url + GUIDE, layers="4:12")
        (view,) = wary.gathering.views()
        assert view.waits_for == "the hashes of layers 0:4, embedding"


async def test_nodes_that_answer_nonsense_are_none(tmp_path: Path, web_server: FaultyServer) -> None:
    beyond = Digests(status="whole", known=(DigestRun(60_000, bytes(32)),))
    answers = {
        "nothing": b"",
        "noise": b"\xc1\xff" * 50,
        "another answer": encode_response(Piece(status="busy")),
        "tensors that are not": encode_response(beyond),
    }
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        for name, body in answers.items():

            async def answer(sender: str, question: bytes, body: bytes = body) -> bytes:
                return body

            async def drop(sender: str, header: bytes, payload: memoryview) -> None:
                raise AssertionError("nobody sends messages")

            network.add(name).serve(answer, drop)
        async with open_stand(tmp_path, network=network) as stand:
            download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
            assert (download.state, download.error) == ("done", "")
            (view,) = stand.gathering.views()
            assert (view.waits_for, view.contradictions) == (
                "the hashes of layers 0:4, 8:12, embedding, head",
                (),
            )
        nursery.cancel_scope.cancel()


async def test_files_with_another_sha256_are_not_mixed(tmp_path: Path, web_server: FaultyServer) -> None:
    async with (
        InMemoryNetwork() as network,
        open_node(tmp_path, network, "a") as first,
        open_node(tmp_path, network, "b") as second,
    ):
        await first.fetch(web_server.url + GUIDE, layers="0:4", sha256="ab" * 32)
        await second.fetch(web_server.url + GUIDE, layers="4:12", sha256="cd" * 32)
        assert second.gathering.views()[0].waits_for == "the hashes of layers 0:4, embedding"
        assert first.gathering.views()[0].waits_for == "the hashes of layers 4:12, head"


async def test_a_lost_answer_is_asked_for_again(tmp_path: Path, web_server: FaultyServer) -> None:
    async with (
        InMemoryNetwork() as network,
        open_node(tmp_path, network, "a") as holder,
        open_node(tmp_path, network, "b", reask_s=0.02) as stand,
    ):
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert download.view().waits_for != ""
        # Nothing tells the other node that there is something to hear now.
        holder.catalogue.add(GUIDE_PATH, "mine")
        check_is_the_guide(await eventually(stand), stand, "4:8")
