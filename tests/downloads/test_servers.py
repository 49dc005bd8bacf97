"""Servers that refuse, redirect and ask for patience, and what people write for the place of a model."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
import trio
from download_stand import (
    DATA,
    MODEL,
    SETTINGS,
    open_stand,
)
from faulty_server import FaultyServer, reset_in_the_middle, status, well
from trio.testing import MockClock

from swarmllm.config import DownloadsTable
from swarmllm.downloads import DownloadRequest
from swarmllm.downloads.remote import Remote, RemoteFileInfo, _certificates, open_http
from swarmllm.downloads.settings import RetrySchedule, from_environment
from swarmllm.downloads.source import DownloadError, DownloadRefused, Offline, ServerBusy
from swarmllm.errors import InvalidRequest


@pytest.mark.parametrize(
    ("code", "words"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (404, "no such file"), (418, "status 418")]
)
async def test_a_refusal_is_final_and_says_what_to_do(
    tmp_path: Path, web_server: FaultyServer, code: int, words: str
) -> None:
    async with open_stand(tmp_path) as stand:
        web_server.faults.append(status(code))
        download = await stand.fetch(web_server.url + MODEL)
        assert download.state == "failed"
        assert words in download.error
        assert len(web_server.asked) == 1


NO_HOSTS = ("hugging..face.co", "a" * 70 + ".com", "xn--", "a" * 300 + ".co", "\u00df" * 64)


@pytest.mark.parametrize("host", NO_HOSTS)
@pytest.mark.parametrize("is_redirect", [False, True])
async def test_a_name_that_no_host_can_have_ends_one_download_only(
    tmp_path: Path, web_server: FaultyServer, host: str, is_redirect: bool
) -> None:
    async with open_stand(tmp_path) as stand:
        address = f"https://{host}/x.gguf"
        if is_redirect:
            web_server.redirects["/moved.gguf"] = address
            address = f"{web_server.url}/moved.gguf"
        with contextlib.suppress(InvalidRequest):  # of what is no address the download does not begin
            download = await stand.fetch(address)
            assert (download.state, "own" in download.error) == ("failed", False), download.error
        assert (await stand.fetch(web_server.url + MODEL)).state == "done"


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("x"), ExceptionGroup("", [ValueError("x"), OSError("y")])]
)
async def test_whatever_a_download_raises_ends_that_download_only(
    tmp_path: Path, web_server: FaultyServer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    facts = Remote.facts

    async def fail_once(remote: Remote) -> RemoteFileInfo:
        monkeypatch.setattr(Remote, "facts", facts)
        raise error

    async with open_stand(tmp_path) as stand:
        monkeypatch.setattr(Remote, "facts", fail_once)
        download = await stand.fetch(web_server.url + MODEL)
        assert (download.state, "error of this node's own" in download.error) == ("failed", True)
        assert (await stand.fetch(web_server.url + MODEL)).state == "done"


async def test_a_server_that_never_recovers_is_given_up_and_what_came_is_kept(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        web_server.faults.extend([well] * 3 + [status(503)] * 200)
        download = await stand.fetch(web_server.url + MODEL)
        assert download.state == "failed"
        assert "given up after 8 attempts" in download.error
        assert [path.name for path in stand.parts] == ["part.gguf", "state.json"]


async def test_trouble_is_told_while_it_is_tried_again_and_forgotten_when_it_goes_on(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    # With more lanes the others go on meanwhile, and what one of them met is forgotten at once.
    async with open_stand(tmp_path, replace(SETTINGS, n_lanes=1)) as stand:
        told: list[str] = []
        web_server.on_request = lambda: told.extend(view.trouble for view in stand.downloads.list())
        web_server.faults.extend([well, reset_in_the_middle])
        download = await stand.fetch(web_server.url + MODEL)
        assert any("the connection" in trouble or web_server.url in trouble for trouble in told), told
        assert (download.state, download.view().trouble) == ("done", "")


async def test_a_server_that_asks_for_an_hour_is_given_up_at_once(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    async with open_stand(tmp_path) as stand:
        web_server.faults.append(status(429, Retry_After="3600"))
        download = await stand.fetch(web_server.url + MODEL)
        assert "3600 s of patience" in download.error


async def test_patience_is_what_the_server_asks_for(autojump_clock: MockClock) -> None:
    schedule = RetrySchedule(SETTINGS)
    await schedule.wait(ServerBusy("busy", 7.0))
    assert trio.current_time() == 7.0
    for _ in range(SETTINGS.max_failures - 2):
        await schedule.wait(ServerBusy("busy", 0.0))
    with pytest.raises(DownloadError, match="given up"):
        await schedule.wait(ServerBusy("busy", 0.0))


async def test_the_token_goes_to_the_endpoint_and_nowhere_else(
    tmp_path: Path, web_server: FaultyServer
) -> None:
    elsewhere = web_server.url.replace("127.0.0.1", "localhost")
    web_server.redirects["/org/repo/resolve/main/tiny-q8_0.gguf"] = elsewhere + MODEL
    web_server.headers = {
        "X-Linked-Etag": f'"{hashlib.sha256(DATA).hexdigest()}"',
        "X-Linked-Size": str(len(DATA)),
    }
    settings = replace(SETTINGS, endpoint=web_server.url, token="hf_secret")
    async with open_stand(tmp_path, settings) as stand:
        download = await stand.fetch("hf:org/repo:tiny-q8_0.gguf")
        assert (download.state, download.error) == ("done", "")
        tokens = {(asked.host.partition(":")[0], asked.authorization) for asked in web_server.asked}
        assert tokens == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}
        web_server.asked.clear()
        await stand.fetch(web_server.url + MODEL)
        assert {asked.authorization for asked in web_server.asked} == {None}
        web_server.asked.clear()
        await stand.fetch("hf:org/repo:tiny-q8_0.gguf", endpoint=elsewhere)
        assert {asked.authorization for asked in web_server.asked} == {None}, "the node's own token"
    assert "hf_secret" not in repr(settings)


async def test_hugging_faces_hash_is_checked(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.redirects["/org/repo/resolve/main/a.gguf"] = web_server.url + MODEL
    web_server.headers = {"X-Linked-Etag": f'"{"ab" * 32}"'}
    async with open_stand(tmp_path, replace(SETTINGS, endpoint=web_server.url)) as stand:
        download = await stand.fetch("hf:org/repo:a.gguf")
        assert f"does not have the SHA-256 {'ab' * 32}" in download.error


async def test_encryption_is_not_given_up_on_the_way() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://127.0.0.1:1/file"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(DownloadRefused, match="without encryption"):
            await Remote(http, "https://hub.example/file", "", SETTINGS).facts()


async def test_certificates_are_read_once_and_not_on_the_event_loops_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers: list[threading.Thread] = []

    def read() -> ssl.SSLContext:
        readers.append(threading.current_thread())
        return ssl.create_default_context()

    monkeypatch.setattr(httpx, "create_ssl_context", read)
    _certificates.cache_clear()
    for _ in range(2):
        async with open_http(from_environment({}, DownloadsTable())):
            pass
    _certificates.cache_clear()
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


@pytest.mark.parametrize(
    "place",
    ["https:path", "location: https://hub.example/file", "https://[[", "https://a..b/x"],
)
async def test_a_redirect_to_no_address_is_a_refusal(place: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": place})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        with pytest.raises(DownloadRefused, match="no address"):
            await Remote(http, "https://hub.example/file", "", SETTINGS).facts()


async def test_a_proxy_of_the_environment_is_asked_and_no_proxy_is_honoured(
    tmp_path: Path, web_server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at the address itself: only the proxy can have given it."""
    nowhere = "http://127.0.0.1:9" + MODEL
    monkeypatch.setenv("http_proxy", web_server.url)
    async with open_stand(tmp_path) as stand:
        assert (await stand.fetch(nowhere)).state == "done"
        assert set(web_server.proxied) == {nowhere}
        web_server.proxied.clear()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert (await stand.fetch(web_server.url + MODEL, name="again")).state == "done"
        assert web_server.proxied == []


async def test_redirects_in_a_circle_end(tmp_path: Path, web_server: FaultyServer) -> None:
    web_server.redirects["/round"] = "/round"
    async with open_stand(tmp_path) as stand:
        download = await stand.fetch(web_server.url + "/round")
        assert "more than 5 redirects" in download.error


async def test_a_repository_is_asked_for_its_files(tmp_path: Path, web_server: FaultyServer) -> None:
    names = ["README.md", "tiny-Q8_0.gguf", "tiny-q4_k_m.gguf", "mmproj-tiny.gguf"]
    listing = {"id": "org/repo", "siblings": [{"rfilename": name} for name in names]}
    web_server.files["/api/models/org/repo"] = msgspec.json.encode(listing)
    web_server.files["/org/repo/resolve/main/tiny-Q8_0.gguf"] = DATA
    async with open_stand(tmp_path, replace(SETTINGS, endpoint=web_server.url)) as stand:
        chosen = await stand.fetch("hf:org/repo:Q8_0")
        assert (chosen.state, chosen.model) == ("done", "tiny-q8_0")
        unclear = await stand.fetch("hf:org/repo")
        assert "has 2 that fit; name one of them: tiny-Q8_0.gguf, tiny-q4_k_m.gguf" in unclear.error
        nothing = await stand.fetch("hf:org/repo:Q2_K")
        assert "no GGUF with 'Q2_K'" in nothing.error
        for answer in (b"<html>", b'{"siblings": [{"rfilename": "\xff"}]}', b'{"x": ' + b"[" * 5000):
            web_server.files["/api/models/org/repo"] = answer
            nonsense = await stand.fetch("hf:org/repo")
            assert "not a list of files" in nonsense.error


@pytest.mark.parametrize(
    "source",
    [
        "tiny.gguf",
        "ftp://example.org/x.gguf",
        "http://example.org/x.gguf",
        "https://me:secret@example.org/x.gguf",
        "https://",
        "hf:repo",
        "hf:org/repo:../../x.gguf",
        "hf:org/../x:y.gguf",
        "https://example.org/\n",
        "https://example.org:0/x",
        "x" * 3000,
    ],
)
async def test_what_is_no_source_is_refused(tmp_path: Path, source: str) -> None:
    async with open_stand(tmp_path) as stand:
        with pytest.raises(InvalidRequest) as refused:
            stand.downloads.start(DownloadRequest(source))
        assert refused.value.field == "source"


async def test_offline_means_offline(tmp_path: Path, web_server: FaultyServer) -> None:
    for settings in (
        from_environment({}, DownloadsTable(offline=True)),
        from_environment({"HF_HUB_OFFLINE": "1"}, DownloadsTable()),
    ):
        async with open_stand(tmp_path, settings) as stand:
            with pytest.raises(Offline):
                stand.downloads.start(DownloadRequest(web_server.url + MODEL))
    assert web_server.asked == []
