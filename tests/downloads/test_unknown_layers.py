"""Some layers of a model that no node knows: only their bytes are read, and the nodes find out together which
model it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import download_stand
import pytest
import trio
from download_stand import GUIDE, GUIDE_DATA, PIECE_BYTES, SETTINGS, Stand, guide
from shelf import FAULTS, Shelf, well

from swarmllm.downloads.spans import n_bytes
from swarmllm.downloads.waiting import NOTES, PART
from swarmllm.errors import Conflict, ModelNotFound
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import CatalogueEntry, LayerRange, needed_tensors
from swarmllm.swarm.memory import InMemoryNetwork
from swarmllm_proto.codec import encode_response
from swarmllm_proto.file_digests import DigestRun, Digests
from swarmllm_proto.swarm import Piece

NAME = "guide-q8_0"
open_stand = partial(download_stand.open_stand, settings=replace(SETTINGS, piece_bytes=2**20))
THIRDS = {"a": "0:4", "b": "4:8", "c": "8:12"}


def wanted(layers: str) -> list[tuple[int, int]]:
    needed = needed_tensors(guide(), LayerRange.parse(layers))
    return [(tensor.offset, tensor.offset + tensor.size_bytes) for tensor in needed]


def header_bytes() -> int:
    """As it is read: in steps, because nobody knows its length before."""
    exact = min(tensor.offset for shard in guide().shards for tensor in shard.tensors)
    at = 0
    while at < exact:
        at += max(PIECE_BYTES, at // 4)
    return at


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 (what other nodes say)
            await trio.sleep(0.01)


async def eventually(stand: Stand) -> CatalogueEntry:
    """The model that the layers became."""
    await until(lambda: not stand.gathering.views())
    return stand.catalogue.resolve(NAME)


def check_is_the_guide(entry: CatalogueEntry, stand: Stand, layers: str) -> None:
    assert entry.model_id == guide().model_id
    assert entry.is_stored
    assert entry.absent(needed_tensors(guide(), LayerRange.parse(layers))) == ()
    assert stand.store.verify(entry, lambda done, total: None) == ()
    assert stand.parts == []


async def test_only_the_header_and_the_layers_are_read_and_then_they_wait(
    tmp_path: Path, shelf: Shelf
) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", NAME)
        assert download.view().waits_for == "the hashes of layers 0:4, 8:12, embedding, head"
        (view,) = stand.gathering.views()
        assert (view.name, view.n_layers, view.layers) == (NAME, 12, (LayerRange(4, 8),))
        assert (view.waits_for, view.contradictions) == (
            "the hashes of layers 0:4, 8:12, embedding, head",
            (),
        )
        assert stand.catalogue.list() == ()
        assert [path.name for path in stand.parts] == [PART, NOTES]
    # One byte tells the size of the file.
    assert shelf.n_bytes == 1 + header_bytes() + n_bytes(wanted("4:8"))
    assert shelf.n_bytes < len(GUIDE_DATA) / 2


async def test_three_nodes_find_out_together_which_model_it_is(tmp_path: Path, shelf: Shelf) -> None:
    async with InMemoryNetwork() as network, AsyncExitStack() as stack:
        stands = {}
        downloads = []
        for name, layers in THIRDS.items():
            stand = open_stand(tmp_path / name, network=network, node_id=name)
            (tmp_path / name).mkdir()
            stands[name] = await stack.enter_async_context(stand)
            download = await stands[name].fetch(shelf.url + GUIDE, layers=layers)
            assert (download.state, download.error) == ("done", "")
            downloads.append(download)
        assert download.view().waits_for == "", "the last one knows it at once"
        for name, layers in THIRDS.items():
            check_is_the_guide(await eventually(stands[name]), stands[name], layers)
        assert [each.view().waits_for for each in downloads] == ["", "", ""]
    layers_bytes = sum(n_bytes(wanted(layers)) for layers in THIRDS.values())
    assert shelf.n_bytes == 3 * (1 + header_bytes()) + layers_bytes


async def test_who_was_away_is_told_when_it_is_back(tmp_path: Path, shelf: Shelf) -> None:
    for name in THIRDS:
        (tmp_path / name).mkdir()
    async with InMemoryNetwork() as network:
        async with open_stand(tmp_path / "a", network=network, node_id="a") as first:
            await first.fetch(shelf.url + GUIDE, layers="0:4")
        async with (
            open_stand(tmp_path / "b", network=network, node_id="b") as second,
            open_stand(tmp_path / "c", network=network, node_id="c") as third,
        ):
            await second.fetch(shelf.url + GUIDE, layers="4:8")
            await third.fetch(shelf.url + GUIDE, layers="8:12")
            (view,) = third.gathering.views()
            assert view.waits_for == "the hashes of layers 0:4, embedding"
            shelf.files.clear()
            async with open_stand(tmp_path / "a", network=network, node_id="a") as again:
                for stand, layers in ((again, "0:4"), (second, "4:8"), (third, "8:12")):
                    check_is_the_guide(await eventually(stand), stand, layers)


async def test_what_others_said_is_not_forgotten_when_they_leave(tmp_path: Path, shelf: Shelf) -> None:
    for name in THIRDS:
        (tmp_path / name).mkdir()
    async with InMemoryNetwork() as network:
        async with open_stand(tmp_path / "a", network=network, node_id="a") as first:
            await first.fetch(shelf.url + GUIDE, layers="0:4")
            async with open_stand(tmp_path / "b", network=network, node_id="b") as second:
                await second.fetch(shelf.url + GUIDE, layers="4:8")
                await until(lambda: first.gathering.views()[0].waits_for == "the hashes of layers 8:12, head")
        async with open_stand(tmp_path / "a", network=network, node_id="a") as first:
            (view,) = first.gathering.views()
            assert view.waits_for == "the hashes of layers 8:12, head"
            async with open_stand(tmp_path / "c", network=network, node_id="c") as third:
                await third.fetch(shelf.url + GUIDE, layers="8:12")
                check_is_the_guide(await eventually(first), first, "0:4")
                (view,) = third.gathering.views()
                assert view.waits_for == "the hashes of layers 4:8", (
                    "nodes pass nothing on that they did not hash"
                )
                async with open_stand(tmp_path / "b", network=network, node_id="b") as second:
                    check_is_the_guide(await eventually(third), third, "8:12")
                    check_is_the_guide(await eventually(second), second, "4:8")


async def test_one_node_with_the_whole_model_under_any_name_is_enough(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        InMemoryNetwork() as network,
        open_stand(tmp_path / "a", network=network, node_id="a") as holder,
        open_stand(tmp_path / "b", network=network, node_id="b") as stand,
    ):
        holder.catalogue.add(GUIDE_PATH, "something-else")
        download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.view().waits_for) == ("done", "")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "4:8")
        assert shelf.n_bytes == 1 + header_bytes() + n_bytes(wanted("4:8"))


async def test_more_layers_can_be_added_while_they_wait(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        before = shelf.n_bytes
        await stand.fetch(shelf.url + GUIDE, layers="6:10")
        (view,) = stand.gathering.views()
        assert (view.layers, view.waits_for) == (
            (LayerRange(4, 10),),
            "the hashes of layers 0:4, 10:12, embedding, head",
        )
        extra = n_bytes([*wanted("4:8"), *wanted("6:10")]) - n_bytes(wanted("4:8"))
        assert shelf.n_bytes - before == 1 + extra
        await stand.fetch(shelf.url + GUIDE, layers="0:12")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")


async def test_the_whole_file_ends_the_waiting(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        download = await stand.fetch(shelf.url + GUIDE)
        assert (download.state, download.error) == ("done", "")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")
        assert stand.gathering.views() == ()


async def test_contradictions_are_named_and_nothing_is_merged(tmp_path: Path, shelf: Shelf) -> None:
    """Two files that look the same in their header: a model of both would be one that nobody made."""
    tensor = next(t for s in guide().shards for t in s.tensors if t.name == "blk.9.ffn_up.weight")
    damaged = bytearray(GUIDE_DATA)
    damaged[tensor.offset] ^= 1
    shelf.files["/other/guide-q8_0.gguf"] = bytes(damaged)
    async with InMemoryNetwork() as network, AsyncExitStack() as stack:
        stands = {}
        for name in "abcd":
            (tmp_path / name).mkdir()
            stands[name] = await stack.enter_async_context(
                open_stand(tmp_path / name, network=network, node_id=name, reask_s=0.05)
            )
        for name in "ac":
            await stands[name].fetch(shelf.url + GUIDE, layers=THIRDS[name])
        await stands["d"].fetch(shelf.url + "/other/guide-q8_0.gguf", layers="8:12")
        await stands["b"].fetch(shelf.url + GUIDE, layers=THIRDS["b"])
        await until(lambda: all(stands[name].gathering.views()[0].contradictions for name in "abcd"))
        for name in "ab":
            (view,) = stands[name].gathering.views()
            assert view.contradictions == (("blk.9.ffn_up.weight", ("c", "d")),)
            assert view.waits_for == "the hashes of layers 8:12, head"
        (view,) = stands["c"].gathering.views()
        assert view.contradictions == (("blk.9.ffn_up.weight", ("c", "d")),)
        assert view.waits_for == "nodes that contradict each other to agree"
        assert stands["c"].catalogue.list() == ()
        # Whoever has the wrong file removes it; then the others need nothing more.
        await stands["d"].gathering.remove(NAME)
        assert stands["d"].parts == []
        for name, layers in THIRDS.items():
            check_is_the_guide(await eventually(stands[name]), stands[name], layers)


async def test_a_node_that_is_not_trusted_says_nothing_that_counts(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        InMemoryNetwork() as network,
        open_stand(tmp_path / "a", network=network, node_id="a") as stand,
        open_stand(tmp_path / "b", network=network, node_id="b", believes=()) as wary,
    ):
        await stand.fetch(shelf.url + GUIDE, layers="0:4")
        await wary.fetch(shelf.url + GUIDE, layers="4:12")
        (view,) = wary.gathering.views()
        assert view.waits_for == "the hashes of layers 0:4, embedding"


async def test_nodes_that_answer_nonsense_are_none(tmp_path: Path, shelf: Shelf) -> None:
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
            download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
            assert (download.state, download.error) == ("done", "")
            (view,) = stand.gathering.views()
            assert (view.waits_for, view.contradictions) == (
                "the hashes of layers 0:4, 8:12, embedding, head",
                (),
            )
        nursery.cancel_scope.cancel()


async def test_files_with_another_sha256_are_not_mixed(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        InMemoryNetwork() as network,
        open_stand(tmp_path / "a", network=network, node_id="a") as first,
        open_stand(tmp_path / "b", network=network, node_id="b") as second,
    ):
        await first.fetch(shelf.url + GUIDE, layers="0:4", sha256="ab" * 32)
        await second.fetch(shelf.url + GUIDE, layers="4:12", sha256="cd" * 32)
        assert second.gathering.views()[0].waits_for == "the hashes of layers 0:4, embedding"
        assert first.gathering.views()[0].waits_for == "the hashes of layers 4:12, head"


@pytest.mark.parametrize("fault", ["reset in the middle", "too short", "other bytes", "429"])
async def test_faults_cost_attempts_and_nothing_else(tmp_path: Path, shelf: Shelf, fault: str) -> None:
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(GUIDE_PATH, "mine")
        # The first answer says whether there are ranges.
        shelf.faults.extend([well, FAULTS[fault], well, FAULTS[fault], FAULTS[fault], well, FAULTS[fault]])
        download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", "mine")


async def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path, shelf: Shelf) -> None:
    token, hold = trio.lowlevel.current_trio_token(), trio.Event()

    def after_some() -> None:
        if len(shelf.asked) == 30:
            token.run_sync_soon(hold.set)

    shelf.on_request = after_some
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(shelf.url + GUIDE, layers="4:8")
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        assert download.state == "cancelled"
        assert stand.gathering.views() == ()
    shelf.on_request = lambda: None
    before = len(shelf.asked)
    async with open_stand(tmp_path) as stand:
        assert (await stand.fetch(shelf.url + GUIDE, layers="4:8")).state == "done"
        stand.catalogue.add(GUIDE_PATH, "mine")
        await stand.gathering.look(stand.parts[0].parent)
        assert stand.gathering.views() == ()
    again = n_bytes(shelf.spans(GUIDE)[before:])
    assert again < n_bytes(wanted("4:8"))


async def test_a_changed_file_is_not_mixed_with_what_waits(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        shelf.files[GUIDE] = bytes([GUIDE_DATA[0]]) + GUIDE_DATA[1:-1] + bytes([GUIDE_DATA[-1] ^ 1])
        download = await stand.fetch(shelf.url + GUIDE, layers="8:12")
        assert download.state == "failed"
        assert "models rm guide-q8_0" in download.error
        await stand.gathering.remove(NAME)
        assert stand.parts == []
        assert (await stand.fetch(shelf.url + GUIDE, layers="8:12")).state == "done"


async def test_a_file_that_changes_on_the_way_is_begun_anew(tmp_path: Path, shelf: Shelf) -> None:
    shelf.files[GUIDE] = GUIDE_DATA[:-1] + bytes([GUIDE_DATA[-1] ^ 1])

    def change() -> None:
        if len(shelf.asked) == 30:
            shelf.files[GUIDE] = GUIDE_DATA

    shelf.on_request = change
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(GUIDE_PATH, "mine")
        download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", "mine")


async def test_one_name_waits_for_one_file(tmp_path: Path, shelf: Shelf) -> None:
    shelf.files["/other/guide-q8_0.gguf"] = GUIDE_DATA
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        refused = await stand.fetch(shelf.url + "/other/guide-q8_0.gguf", layers="8:12")
        assert "choose with --name" in refused.error
        with pytest.raises(ModelNotFound):
            await stand.gathering.remove("unheard-of")


async def test_what_is_being_fetched_is_not_removed(tmp_path: Path, shelf: Shelf) -> None:
    token, hold = trio.lowlevel.current_trio_token(), trio.Event()
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        download = stand.downloads.start(shelf.url + GUIDE, layers="8:12")
        n_before = len(shelf.asked)
        shelf.on_request = lambda: token.run_sync_soon(hold.set) if len(shelf.asked) > n_before + 3 else None
        await hold.wait()
        with pytest.raises(Conflict):
            await stand.gathering.remove(NAME)
        await download.ended.wait()


async def test_layers_that_wait_count_against_the_quota(tmp_path: Path, shelf: Shelf) -> None:
    needed = n_bytes(wanted("4:8"))
    async with open_stand(tmp_path, quota_bytes=2 * needed) as stand:
        assert (await stand.fetch(shelf.url + GUIDE, layers="4:8")).state == "done"
        assert needed < stand.store.used_bytes() < 2 * needed
        full = await stand.fetch(shelf.url + GUIDE, layers="0:8")
        assert "store.quota_gib" in full.error
        assert stand.gathering.views()[0].layers == (LayerRange(4, 8),)


async def test_layers_that_the_model_has_not_are_refused(tmp_path: Path, shelf: Shelf) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(shelf.url + GUIDE, layers="8:16")
        assert "has layers 0:12, not 8:16" in download.error
        assert stand.parts == []


@pytest.mark.parametrize("damage", [b"", b'{"url": 7}'])
async def test_damaged_notes_are_not_believed(tmp_path: Path, shelf: Shelf, damage: bytes) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        notes = stand.parts[1]
        assert notes.name == NOTES
    notes.write_bytes(damage)
    async with open_stand(tmp_path) as stand:
        assert stand.gathering.views() == ()
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert stand.gathering.views()[0].layers == (LayerRange(4, 8),)


async def test_bytes_that_were_damaged_while_they_waited_do_not_count(tmp_path: Path, shelf: Shelf) -> None:
    start, _ = max(wanted("4:8"), key=lambda span: span[1] - span[0])
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="4:8")
        with stand.parts[0].open("r+b") as file:
            file.seek(start)
            file.write(bytes([GUIDE_DATA[start] ^ 1]))
        await stand.fetch(shelf.url + GUIDE, layers="8:12")
        download = await stand.fetch(shelf.url + GUIDE, layers="0:4")
        assert download.view().waits_for == ""
        entry = stand.catalogue.resolve(NAME)
        assert entry.model_id == guide().model_id
        needed = needed_tensors(guide(), LayerRange(0, 12))
        assert [tensor.offset for tensor in entry.absent(needed)] == [start]
        assert stand.store.verify(entry, lambda done, total: None) == ()


async def test_a_kill_between_two_steps_of_becoming_a_model_loses_nothing(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="0:8")
        await stand.fetch(shelf.url + GUIDE, layers="8:10")
        folder = stand.parts[0].parent
    shelf_files = dict(shelf.files)
    shelf.files.clear()
    for step in ("adopt", "get"):
        async with open_stand(tmp_path) as stand:
            stand.catalogue.add(GUIDE_PATH, "mine")
            digests = {t.name: t.blake3 for s in guide().shards for t in s.tensors}
            manifest = stand.store.manifest_of_parts(folder / PART, NAME, digests)
            stand.catalogue.remove("mine")

            def die(*_: object) -> None:
                raise Killed

            names = {t.name for t in needed_tensors(guide(), LayerRange(0, 10))}
            with monkeypatch.context() as patch:
                patch.setattr(stand.catalogue, step, die)
                with pytest.raises(Killed):
                    stand.store.take_in_parts(folder / PART, NAME, manifest, names)
            stand.store.sweep()
            assert stand.gathering.views()[0].layers == (LayerRange(0, 10),)
    shelf.files.update(shelf_files)
    async with open_stand(tmp_path) as stand:
        await stand.fetch(shelf.url + GUIDE, layers="10:12")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")


async def test_a_lost_answer_is_asked_for_again(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with (
        InMemoryNetwork() as network,
        open_stand(tmp_path / "a", network=network, node_id="a") as holder,
        open_stand(tmp_path / "b", network=network, node_id="b", reask_s=0.02) as stand,
    ):
        download = await stand.fetch(shelf.url + GUIDE, layers="4:8")
        assert download.view().waits_for != ""
        # Nothing tells the other node that there is something to hear now.
        holder.catalogue.add(GUIDE_PATH, "mine")
        check_is_the_guide(await eventually(stand), stand, "4:8")
