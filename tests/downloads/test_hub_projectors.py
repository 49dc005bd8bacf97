"""A model of a repository comes with the projector that lies beside it there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio
from download_stand import GUIDE_DATA as DATA
from download_stand import SETTINGS, Stand, guide, open_stand
from faulty_server import FaultyServer
from vision_models import projector

from swarmllm.downloads.source import choose_projector
from swarmllm.errors import BadModel
from swarmllm.models import CatalogueEntry
from swarmllm.models.projector_store import ProjectorStore

REPO = "/org/repo/resolve/main/"
MMPROJ = "mmproj-guide-f16.gguf"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["tiny-Q8_0.gguf", "README.md"], ""),
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        (["mmproj-Q8_0.gguf", "mmproj-F32.gguf"], "mmproj-Q8_0.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        (["mmproj-other-f16.gguf", "mmproj-tiny-Q8_0.gguf"], "mmproj-tiny-Q8_0.gguf"),
        (["big/mmproj-guide-f16.gguf", "mmproj-any-q8_0.gguf"], "mmproj-any-q8_0.gguf"),
        (["big/mmproj-f16.gguf"], "big/mmproj-f16.gguf"),
        (["mmproj-f16.safetensors"], ""),
    ],
)
def test_the_one_that_is_like_the_model_is_chosen_and_f16_before_q8_0(names: list[str], chosen: str) -> None:
    assert choose_projector(names, "tiny-Q8_0.gguf") == chosen


def put(web_server: FaultyServer, mmproj: bytes | None) -> None:
    """A repository with the model and its projector."""
    names = ["guide-q8_0.gguf", *([MMPROJ] if mmproj is not None else [])]
    web_server.files["/api/models/org/repo"] = json.dumps(
        {"siblings": [{"rfilename": n} for n in names]}
    ).encode()
    web_server.files[f"{REPO}guide-q8_0.gguf"] = DATA
    if mmproj is not None:
        web_server.files[REPO + MMPROJ] = mmproj


def file_of(folder: Path, n_embd: int, family: str = "janus_pro") -> bytes:
    path = projector(folder / "made.gguf", "janus_pro", n_embd)
    data = path.read_bytes()
    path.unlink()
    return data.replace(b"janus_pro", family.encode().ljust(9, b"x")) if family != "janus_pro" else data


@dataclass
class Attaching:
    store: ProjectorStore
    stand: Stand

    async def attach_fetched(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        taken = await trio.to_thread.run_sync(self.store.take_in, path)
        return await trio.to_thread.run_sync(self.stand.catalogue.attach, entry.model_id, taken)


class Refusing:
    async def attach_fetched(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        raise BadModel("a grey picture ended its process", field="mmproj")


@asynccontextmanager
async def attaching(folder: Path, web_server: FaultyServer) -> AsyncIterator[tuple[Stand, ProjectorStore]]:
    """A stand whose downloads attach projectors, without the trial in a process."""
    store = ProjectorStore(folder / "projectors")
    async with open_stand(folder, replace(SETTINGS, endpoint=web_server.url)) as stand:
        stand.downloads._projectors = Attaching(store, stand)
        yield stand, store


@pytest.mark.parametrize("source", ["hf:org/repo", "hf:org/repo:guide-q8_0.gguf"])
async def test_it_comes_after_the_model_and_its_bytes_are_told_before(
    tmp_path: Path, web_server: FaultyServer, source: str
) -> None:
    mmproj = file_of(tmp_path, guide().n_embd)
    put(web_server, mmproj)
    totals: set[int] = set()
    async with attaching(tmp_path, web_server) as (stand, store):

        def look() -> None:
            totals.update(view.total_bytes for view in stand.downloads.list() if view.total_bytes)

        web_server.on_request = look
        download = await stand.fetch(source)
        view = download.view()
        assert (view.state, view.error, view.projector) == ("done", "", MMPROJ)
        assert (view.projector_bytes, view.total_bytes) == (len(mmproj), len(DATA) + len(mmproj))
        assert totals == {view.total_bytes}
        assert view.done_bytes == view.total_bytes
        attached = (await trio.to_thread.run_sync(stand.catalogue.get, view.model)).projector
        assert attached is not None
        assert await trio.Path(attached.path).read_bytes() == mmproj
        assert store.owns(attached)
        assert stand.parts == []
        # Again: it is here, with the model.
        n_asked = len(web_server.spans(REPO + MMPROJ))
        again = (await stand.fetch(source)).view()
        assert (again.error, again.projector, again.projector_bytes) == ("", "", 0)
        assert again.done_bytes == again.total_bytes == len(DATA)
        assert len(web_server.spans(REPO + MMPROJ)) - n_asked <= 2, "its header only"
    asked = [each.path for each in web_server.asked]
    assert asked.index(REPO + MMPROJ) < len(asked) - 1 - asked[::-1].index(f"{REPO}guide-q8_0.gguf")


@pytest.mark.parametrize(
    ("options", "has_mmproj", "listed"),
    [({"mmproj": False}, True, True), ({}, False, True), ({}, True, False)],
)
async def test_a_model_comes_without_one(
    tmp_path: Path, web_server: FaultyServer, options: dict[str, bool], has_mmproj: bool, listed: bool
) -> None:
    put(web_server, file_of(tmp_path, guide().n_embd) if has_mmproj else None)
    if not listed:
        # A mirror of files that lists nothing.
        del web_server.files["/api/models/org/repo"]
    async with attaching(tmp_path, web_server) as (stand, _):
        view = (await stand.fetch("hf:org/repo:guide-q8_0.gguf", **options)).view()
        assert (view.state, view.error, view.projector) == ("done", "", "")
        assert (await trio.to_thread.run_sync(stand.catalogue.get, view.model)).projector is None
    assert not web_server.spans(REPO + MMPROJ)


@pytest.mark.parametrize(
    ("n_embd", "family", "reason"),
    [(0, "gemma3", "gemma3"), (24, "janus_pro", "rows of 24 numbers"), (0, "unheardof", "not supported")],
)
async def test_one_that_cannot_be_used_is_not_fetched_and_the_download_says_why(
    tmp_path: Path, web_server: FaultyServer, n_embd: int, family: str, reason: str
) -> None:
    put(web_server, file_of(tmp_path, n_embd or guide().n_embd, family))
    async with attaching(tmp_path, web_server) as (stand, _):
        view = (await stand.fetch("hf:org/repo")).view()
        assert view.state == "done"
        assert reason in view.error
        assert (view.projector, view.projector_bytes) == ("", 0)
        assert view.done_bytes == view.total_bytes == len(DATA)
    assert max(end for _, end in web_server.spans(REPO + MMPROJ)) <= SETTINGS.header_step_bytes


async def test_one_that_turns_out_damaged_leaves_the_model_and_nothing_on_the_disk(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    put(web_server, file_of(tmp_path, guide().n_embd))
    async with attaching(tmp_path, web_server) as (stand, _):
        stand.downloads._projectors = Refusing()
        view = (await stand.fetch("hf:org/repo")).view()
        assert (view.state, view.model) == ("done", "guide-q8_0")
        assert "takes no pictures: a grey picture ended its process" in view.error
        assert stand.parts == []


async def test_what_was_interrupted_goes_on(tmp_path: Path, web_server: FaultyServer) -> None:
    mmproj = file_of(tmp_path, guide().n_embd) + bytes(SETTINGS.piece_bytes * 8)
    put(web_server, mmproj)
    async with attaching(tmp_path, web_server) as (stand, _):

        def look() -> None:
            if len(web_server.spans(REPO + MMPROJ)) == 6:
                # The header was read, and some pieces; now it is gone.
                web_server.files.pop(REPO + MMPROJ, None)

        web_server.on_request = look
        view = (await stand.fetch("hf:org/repo")).view()
        assert view.state == "done"
        assert "there is no such file" in view.error
        web_server.on_request, web_server.files[REPO + MMPROJ] = lambda: None, mmproj
        n_asked = len(web_server.spans(REPO + MMPROJ))
        assert (await stand.fetch("hf:org/repo")).view().error == ""
        again = web_server.spans(REPO + MMPROJ)[n_asked:]
        assert sum(end - start for start, end in again) < len(mmproj)
        assert (await trio.to_thread.run_sync(stand.catalogue.get, view.model)).projector is not None
