"""Whole files from a web server that misbehaves: what arrives is the model or nothing, and never twice."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from download_stand import (
    DATA,
    GUIDE,
    MODEL,
    PIECE_BYTES,
    SETTINGS,
    open_stand,
    tiny,
)
from faulty_server import FAULTS, FaultyServer, reset_at_once, reset_in_the_middle, well

from swarmllm.downloads import DownloadRequest
from swarmllm.downloads.digest_book import missing, n_bytes
from swarmllm.errors import Conflict, ModelNotFound
from swarmllm.guide import DRAFT_PATH
from swarmllm.models import CatalogueEntry


async def test_a_file_comes_in_pieces_and_becomes_a_model(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + MODEL)
        assert (download.state, download.error, download.model) == ("done", "", "tiny-q8_0")
        entry = stand.catalogue.resolve("tiny-q8_0")
        assert entry.model_id == tiny().model_id
        assert entry.is_stored
        assert entry.path.read_bytes() == DATA
        assert stand.store.verify(entry, lambda done, total: None) == ()
        assert stand.parts == []
        assert (download.done_bytes, download.total_bytes) == (len(DATA), len(DATA))
    pieces = web_server.spans(MODEL)[1:]
    assert len(pieces) == -(-len(DATA) // PIECE_BYTES)
    assert missing(pieces, len(DATA)) == []


@pytest.mark.parametrize("fault", FAULTS)
async def test_faults_cost_attempts_and_nothing_else(
    tmp_path: Path, web_server: FaultyServer, fault: str
) -> None:
    async with open_stand(tmp_path) as stand:
        web_server.faults.extend(
            [FAULTS[fault], well, well, FAULTS[fault], FAULTS[fault], well, FAULTS[fault]]
        )
        download = await stand.fetch(web_server.url + MODEL)
        assert (download.state, download.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_server_without_ranges_is_read_front_to_back(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    web_server.has_ranges = False
    async with open_stand(tmp_path) as stand:
        web_server.faults.extend([well, reset_in_the_middle])
        download = await stand.fetch(web_server.url + MODEL)
        assert download.state == "done"
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA
        web_server.faults.extend([well, *[reset_in_the_middle] * 20])
        stand.store.remove(stand.catalogue.get("tiny-q8_0"))
        failed = await stand.fetch(web_server.url + MODEL)
        assert failed.state == "failed"
        assert "given up after 8 attempts" in failed.error


async def test_what_was_interrupted_goes_on_where_it_was(tmp_path: Path, web_server: FaultyServer) -> None:
    hold = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def after_some() -> None:
        if len(web_server.asked) == 6:
            token.run_sync_soon(hold.set)

    web_server.on_request = after_some
    async with open_stand(tmp_path) as stand:
        download = stand.downloads.start(DownloadRequest(web_server.url + MODEL))
        await hold.wait()
        download.scope.cancel()
        await download.ended.wait()
        assert download.state == "cancelled"
        (state,) = [path for path in stand.parts if path.name == "state.json"]
        done = [tuple(span) for span in json.loads(state.read_bytes())["done"]]
        assert 0 < n_bytes(done) < len(DATA)
        web_server.asked.clear()
    async with open_stand(tmp_path) as stand:
        again = await stand.fetch(web_server.url + MODEL)
        assert (again.state, again.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA
    asked = web_server.spans(MODEL)[1:]
    assert n_bytes(asked) == len(DATA) - n_bytes(done)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b'{"done": [[-5, 10]]}'])
async def test_a_damaged_note_of_what_is_there_is_not_believed(
    tmp_path: Path, web_server: FaultyServer, damage: bytes
) -> None:
    async with open_stand(tmp_path) as stand:
        folder = tmp_path / "downloads" / hashlib.sha256((web_server.url + MODEL).encode()).hexdigest()[:16]
        folder.mkdir(parents=True)
        (folder / "state.json").write_bytes(damage)
        (folder / "part.gguf").write_bytes(b"x" * len(DATA))
        assert (await stand.fetch(web_server.url + MODEL)).state == "done"
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_file_that_changes_meanwhile_is_begun_anew(tmp_path: Path, web_server: FaultyServer) -> None:
    old = bytes([DATA[0] ^ 1]) + DATA[1:]
    web_server.files[MODEL] = old

    def change() -> None:
        if len(web_server.asked) == 4:
            web_server.files[MODEL] = DATA

    web_server.on_request = change
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + MODEL)
        assert (download.state, download.error) == ("done", "")
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA


async def test_a_file_that_never_stays_the_same_is_given_up(tmp_path: Path, web_server: FaultyServer) -> None:
    def change() -> None:
        web_server.files[MODEL] = DATA[:-1] + bytes([len(web_server.asked) % 256])

    web_server.on_request = change
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + MODEL)
        assert download.state == "failed"
        assert "has changed on the server" in download.error
        assert stand.catalogue.list() == ()


async def test_wrong_bytes_are_thrown_away(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + MODEL, sha256="00" * 32)
        assert download.state == "failed"
        assert "does not have the SHA-256 0000" in download.error
        assert stand.parts == []
        assert stand.catalogue.list() == ()
        right = await stand.fetch(web_server.url + MODEL, sha256=hashlib.sha256(DATA).hexdigest().upper())
        assert right.state == "done"


async def test_what_is_no_model_does_not_become_one(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.files["/page.gguf"] = b"<html>not what you wanted</html>"
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + "/page.gguf")
        assert download.state == "failed"
        assert "not a GGUF file" in download.error
        assert stand.catalogue.list() == ()


async def test_a_model_that_is_here_already_is_not_kept_twice(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        stand.catalogue.add(DRAFT_PATH, "mine")
        download = await stand.fetch(web_server.url + MODEL)
        assert (download.state, download.model) == ("done", "mine")
        assert stand.parts == []
        assert stand.store.used_bytes() == 0


async def test_asking_twice_is_one_download(tmp_path: Path, web_server: FaultyServer) -> None:
    async with open_stand(tmp_path) as stand:
        first = stand.downloads.start(DownloadRequest(web_server.url + MODEL))
        assert stand.downloads.start(DownloadRequest(web_server.url + MODEL)) is first
        with pytest.raises(Conflict):
            stand.downloads.start(DownloadRequest(web_server.url + MODEL, layers="0:1"))
        await first.ended.wait()
        assert [view.state for view in stand.downloads.list()] == ["done"]


async def test_a_failed_download_is_tried_again_as_it_was_asked_for(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    """The name, the SHA-256, the layers, and what has arrived."""
    async with open_stand(tmp_path) as stand:
        web_server.faults.extend([well, well, well, *[reset_at_once] * 40])
        sha256 = hashlib.sha256(DATA).hexdigest()
        failed = await stand.fetch(web_server.url + MODEL, name="mine", sha256=sha256)
        assert failed.state == "failed"
        web_server.faults.clear()
        asked = len(web_server.asked)
        again = stand.downloads.retry(failed.id)
        with pytest.raises(Conflict, match="not over"):
            await stand.downloads.clear(again.id)
        with pytest.raises(Conflict):
            stand.downloads.retry(again.id)
        await again.ended.wait()
        assert (again.state, again.model, again.sha256) == ("done", "mine", sha256)
        assert [view.id for view in stand.downloads.list()] == [again.id]
        assert n_bytes(web_server.spans(MODEL)[asked + 1 :]) < len(DATA), (
            "what had arrived is not fetched again"
        )
        with pytest.raises(Conflict):
            stand.downloads.retry(again.id)
        with pytest.raises(ModelNotFound):
            stand.downloads.retry(failed.id)
        layers = await stand.fetch(web_server.url + GUIDE, name="some", layers="0:4")
        layers.state = "failed"
        assert stand.downloads.retry(layers.id).request == layers.request


async def test_a_cleared_download_takes_its_bytes_along_and_no_model(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        done = await stand.fetch(web_server.url + MODEL)
        web_server.faults.extend([well, well, well, *[reset_at_once] * 40])
        failed = await stand.fetch(web_server.url + GUIDE)
        assert failed.state == "failed"
        assert stand.parts
        assert (await stand.downloads.clear(failed.id)).id == failed.id
        assert list(stand.folder.glob("downloads/*")) == []
        await stand.downloads.clear(done.id)
        assert stand.catalogue.resolve("tiny-q8_0").path.read_bytes() == DATA
        assert stand.downloads.list() == ()
        with pytest.raises(ModelNotFound):
            await stand.downloads.clear(failed.id)


async def test_bytes_that_another_download_goes_on_with_stay(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        web_server.faults.extend([well, well, well, *[reset_at_once] * 40])
        failed = await stand.fetch(web_server.url + MODEL)
        web_server.faults.clear()
        web_server.faults.extend([well, well, *[reset_at_once] * 40])
        other = await stand.fetch(web_server.url + MODEL)
        assert (failed.state, other.state) == ("failed", "failed")
        await stand.downloads.clear(failed.id)
        assert stand.parts
        await stand.downloads.clear(other.id)
        assert stand.parts == []


@pytest.mark.parametrize("wanted", [":tiny-q8_0.gguf", ""])
async def test_what_follows_a_download_knows_the_file_of_a_repository(
    tmp_path: Path, web_server: FaultyServer, wanted: str
) -> None:
    seen = []

    async def then(entry: CatalogueEntry, published: str) -> None:
        seen.append(published)

    web_server.files["/org/repo/resolve/main/tiny-q8_0.gguf"] = DATA
    listing = b'{"siblings": [{"rfilename": "tiny-q8_0.gguf"}, {"rfilename": "README.md"}]}'
    web_server.files["/api/models/org/repo"] = listing
    async with open_stand(tmp_path, replace(SETTINGS, endpoint=web_server.url)) as stand:
        download = await stand.fetch(f"hf:org/repo{wanted}", then=then)
    assert seen == [download.view().published] == ["hf:org/repo:tiny-q8_0.gguf"]


async def test_what_follows_a_download_may_fail_and_the_model_stays(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    seen = []

    async def then(entry: CatalogueEntry, published: str) -> None:
        assert published == "", "an address of no hub"
        seen.append(entry.name)
        raise Conflict("no room to share it")

    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + MODEL, then=then)
        assert (download.state, download.error) == ("done", "no room to share it")
        assert seen == [download.model] == ["tiny-q8_0"]
