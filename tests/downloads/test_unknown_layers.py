"""Some layers of a model that this node does not know: only their bytes are read, and kept until it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from download_stand import GUIDE, GUIDE_DATA, guide
from faulty_server import FAULTS, FaultyServer, well
from guide_layers import NAME, check_is_the_guide, header_bytes, open_stand, wanted

from swarmllm.downloads import DownloadRequest
from swarmllm.downloads.digest_book import n_bytes
from swarmllm.downloads.unidentified_model import PART, STATE_FILE
from swarmllm.errors import Conflict, ModelNotFound
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import LayerRange, needed_tensors


async def test_only_the_header_and_the_layers_are_read_and_then_they_wait(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", NAME)
        assert download.view().waits_for == "the hashes of layers 0:4, 8:12, embedding, head"
        (view,) = stand.gathering.views()
        assert (view.name, view.n_layers, view.layers) == (NAME, 12, (LayerRange(4, 8),))
        assert (view.waits_for, view.contradictions) == (
            "the hashes of layers 0:4, 8:12, embedding, head",
            (),
        )
        assert stand.catalogue.list() == ()
        assert [path.name for path in stand.parts] == [PART, STATE_FILE]
    # One byte tells the size of the file.
    assert web_server.n_bytes == 1 + header_bytes() + n_bytes(wanted("4:8"))
    assert web_server.n_bytes < len(GUIDE_DATA) / 2


async def test_more_layers_can_be_added_while_they_wait(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        before = web_server.n_bytes
        await stand.fetch(web_server.url + GUIDE, layers="6:10")
        (view,) = stand.gathering.views()
        assert (view.layers, view.waits_for) == (
            (LayerRange(4, 10),),
            "the hashes of layers 0:4, 10:12, embedding, head",
        )
        extra = n_bytes([*wanted("4:8"), *wanted("6:10")]) - n_bytes(wanted("4:8"))
        assert web_server.n_bytes - before == 1 + extra
        await stand.fetch(web_server.url + GUIDE, layers="0:12")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")


async def test_the_whole_file_ends_the_waiting(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        download = await stand.fetch(web_server.url + GUIDE)
        assert (download.state, download.error) == ("done", "")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")
        assert stand.gathering.views() == ()


@pytest.mark.parametrize("fault", ["reset in the middle", "too short", "other bytes", "429"])
async def test_faults_cost_attempts_and_nothing_else(
    tmp_path: Path, web_server: FaultyServer, fault: str
) -> None:
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(GUIDE_PATH, "mine")
        # The first answer says whether there are ranges.
        web_server.faults.extend(
            [well, FAULTS[fault], well, FAULTS[fault], FAULTS[fault], well, FAULTS[fault]]
        )
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", "mine")


async def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path, web_server: FaultyServer) -> None:
    token, hold = trio.lowlevel.current_trio_token(), trio.Event()

    def after_some() -> None:
        if len(web_server.asked) == 30:
            token.run_sync_soon(hold.set)

    web_server.on_request = after_some
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(DownloadRequest(web_server.url + GUIDE, layers="4:8"))
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        assert download.state == "cancelled"
        assert stand.gathering.views() == ()
    web_server.on_request = lambda: None
    before = len(web_server.asked)
    async with open_stand(tmp_path) as stand:
        assert (await stand.fetch(web_server.url + GUIDE, layers="4:8")).state == "done"
        stand.catalogue.add(GUIDE_PATH, "mine")
        await stand.gathering.look(stand.parts[0].parent)
        assert stand.gathering.views() == ()
    again = n_bytes(web_server.spans(GUIDE)[before:])
    assert again < n_bytes(wanted("4:8"))


async def test_a_changed_file_is_not_mixed_with_what_waits(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        web_server.files[GUIDE] = bytes([GUIDE_DATA[0]]) + GUIDE_DATA[1:-1] + bytes([GUIDE_DATA[-1] ^ 1])
        download = await stand.fetch(web_server.url + GUIDE, layers="8:12")
        assert download.state == "failed"
        assert "models rm guide-q8_0" in download.error
        await stand.gathering.remove(NAME)
        assert stand.parts == []
        assert (await stand.fetch(web_server.url + GUIDE, layers="8:12")).state == "done"


async def test_a_file_that_changes_on_the_way_is_begun_anew(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files[GUIDE] = GUIDE_DATA[:-1] + bytes([GUIDE_DATA[-1] ^ 1])

    def change() -> None:
        if len(web_server.asked) == 30:
            web_server.files[GUIDE] = GUIDE_DATA

    web_server.on_request = change
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(GUIDE_PATH, "mine")
        download = await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert (download.state, download.error, download.model) == ("done", "", "mine")


async def test_one_name_waits_for_one_file(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files["/other/guide-q8_0.gguf"] = GUIDE_DATA
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        refused = await stand.fetch(web_server.url + "/other/guide-q8_0.gguf", layers="8:12")
        assert "choose with --name" in refused.error
        with pytest.raises(ModelNotFound):
            await stand.gathering.remove("unheard-of")


async def test_what_is_being_fetched_is_not_removed(tmp_path: Path, web_server: FaultyServer) -> None:
    token, hold = trio.lowlevel.current_trio_token(), trio.Event()
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        download = stand.downloads.start(DownloadRequest(web_server.url + GUIDE, layers="8:12"))
        n_before = len(web_server.asked)
        web_server.on_request = lambda: (
            token.run_sync_soon(hold.set) if len(web_server.asked) > n_before + 3 else None
        )
        await hold.wait()
        with pytest.raises(Conflict):
            await stand.gathering.remove(NAME)
        await download.ended.wait()


async def test_layers_that_wait_count_against_the_quota(tmp_path: Path, web_server: FaultyServer) -> None:
    needed = n_bytes(wanted("4:8"))
    async with open_stand(tmp_path, quota_bytes=2 * needed) as stand:
        assert (await stand.fetch(web_server.url + GUIDE, layers="4:8")).state == "done"
        assert needed < stand.store.used_bytes() < 2 * needed
        full = await stand.fetch(web_server.url + GUIDE, layers="0:8")
        assert "store.quota_gib" in full.error
        assert stand.gathering.views()[0].layers == (LayerRange(4, 8),)


async def test_layers_that_the_model_has_not_are_refused(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + GUIDE, layers="8:16")
        assert "has layers 0:12, not 8:16" in download.error
        assert stand.parts == []


@pytest.mark.parametrize("damage", [b"", b'{"url": 7}'])
async def test_damaged_notes_are_not_believed(
    tmp_path: Path, web_server: FaultyServer, damage: bytes
) -> None:
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        notes = stand.parts[1]
        assert notes.name == STATE_FILE
    notes.write_bytes(damage)
    async with open_stand(tmp_path) as stand:
        assert stand.gathering.views() == ()
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        assert stand.gathering.views()[0].layers == (LayerRange(4, 8),)


async def test_bytes_that_were_damaged_while_they_waited_do_not_count(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    start, _ = max(wanted("4:8"), key=lambda span: span[1] - span[0])
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="4:8")
        with stand.parts[0].open("r+b") as file:
            file.seek(start)
            file.write(bytes([GUIDE_DATA[start] ^ 1]))
        await stand.fetch(web_server.url + GUIDE, layers="8:12")
        download = await stand.fetch(web_server.url + GUIDE, layers="0:4")
        assert download.view().waits_for == ""
        entry = stand.catalogue.resolve(NAME)
        assert entry.model_id == guide().model_id
        needed = needed_tensors(guide(), LayerRange(0, 12))
        assert [tensor.offset for tensor in entry.absent(needed)] == [start]
        assert stand.store.verify(entry, lambda done, total: None) == ()


async def test_a_kill_between_two_steps_of_becoming_a_model_loses_nothing(
    tmp_path: Path, web_server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="0:8")
        await stand.fetch(web_server.url + GUIDE, layers="8:10")
        folder = stand.parts[0].parent
    shelf_files = dict(web_server.files)
    web_server.files.clear()
    for step in ("adopt", "get"):
        async with open_stand(tmp_path) as stand:
            stand.catalogue.add(GUIDE_PATH, "mine")
            digests = {t.name: t.blake3 for t in guide().tensors}
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
    web_server.files.update(shelf_files)
    async with open_stand(tmp_path) as stand:
        await stand.fetch(web_server.url + GUIDE, layers="10:12")
        check_is_the_guide(stand.catalogue.resolve(NAME), stand, "0:12")
