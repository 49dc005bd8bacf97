"""`swarmllm version`: it asks nobody unless told to, and an index can say anything, slowly, at any length."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from faulty_server import FaultyServer, Handler, open_shelf

from swarmllm import __version__
from swarmllm.cli import version as version_module
from swarmllm.cli.client import EXIT_FAILED, EXIT_OUTDATED, EXIT_USAGE
from swarmllm.cli.main import main
from swarmllm.cli.version import INDEX_VARIABLES

PAGE = "/simple/swarmllm/"


@pytest.fixture
def index() -> Iterator[FaultyServer]:
    with open_shelf() as web_server:
        yield web_server


def wheel(version: str, **fields: Any) -> dict[str, Any]:
    return {"filename": f"swarmllm-{version}-py3-none-any.whl", "url": "x", "hashes": {}} | fields


def put(index: FaultyServer, *files: dict[str, Any]) -> None:
    page = {"meta": {"api-version": "1.1"}, "name": "swarmllm", "files": files}
    index.files[PAGE] = json.dumps(page).encode()


def ask(index: FaultyServer | None, *arguments: str, **env: str) -> Result:
    said = ["--index", f"{index.url}/simple"] if index else []
    unset = dict.fromkeys((*INDEX_VARIABLES, "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"))
    return CliRunner().invoke(main, ["version", *said, *arguments], env=unset | env)


def test_nothing_is_asked_without_check(index: FaultyServer) -> None:
    result = ask(index)
    assert result.exit_code == 0
    assert result.output.startswith(f"SwarmLLM {__version__}, Python 3.")
    assert json.loads(ask(index, "--json").output)["version"] == __version__
    assert index.asked == []


def test_no_index_is_built_in() -> None:
    result = ask(None, "--check")
    assert result.exit_code == EXIT_USAGE
    assert "give --index URL, or set SWARMLLM_INDEX" in result.output


@pytest.mark.parametrize("variable", INDEX_VARIABLES)
def test_the_index_that_pip_and_uv_are_told_of_is_asked(index: FaultyServer, variable: str) -> None:
    put(index, wheel(__version__))
    result = ask(None, "--check", **{variable: f"{index.url}/simple/"})
    assert (result.exit_code, result.output) == (
        0,
        f"SwarmLLM {__version__} is the newest: the index has {__version__}.\n",
    )
    assert [asked.path for asked in index.asked] == [PAGE]


def test_json_is_asked_for_uncompressed(index: FaultyServer) -> None:
    put(index, wheel("0.0.1"))
    asked: list[tuple[str, str]] = []

    def note(handler: Handler, data: bytes) -> None:
        asked.append((handler.headers["Accept"], handler.headers["Accept-Encoding"]))
        handler.give(data)

    index.faults.append(note)
    assert ask(index, "--check").exit_code == 0
    assert asked == [("application/vnd.pypi.simple.v1+json", "identity")]


def test_a_newer_version_is_exit_code_5(index: FaultyServer) -> None:
    put(index, wheel("9.10.0"), wheel("9.9.1"), wheel("0.0.1"))
    result = ask(index, "--check")
    assert result.exit_code == EXIT_OUTDATED
    assert f"SwarmLLM {__version__} is installed, and 9.10.0 is there" in result.output
    result = ask(index, "--check", "--json")
    assert result.exit_code == EXIT_OUTDATED
    shown = json.loads(result.output)
    assert (shown["newest"], shown["is_newest"]) == ("9.10.0", False)


def test_what_pip_would_not_choose_does_not_count(index: FaultyServer) -> None:
    put(
        index,
        wheel("0.0.1"),
        wheel("9.0.0", yanked="broken"),
        wheel("9.1.0rc1"),
        wheel("9.2.0", **{"requires-python": ">=4"}),
        wheel("9.3.0", filename="another-9.3.0-py3-none-any.whl"),
        wheel("9.4.0", filename="swarmllm-9.4.0.exe"),
        wheel("9.5.0", **{"requires-python": "no"}),
        wheel("0.0.2", filename="swarmllm-0.0.2.tar.gz", yanked=False),
    )
    result = ask(index, "--check")
    assert (result.exit_code, "the index has 0.0.2." in result.output) == (0, True)


def test_an_earlier_version_on_the_index_is_no_reason_to_change(index: FaultyServer) -> None:
    put(index, wheel("0.0.1"))
    result = ask(index, "--check")
    assert (result.exit_code, "is the newest: the index has 0.0.1" in result.output) == (0, True)


@pytest.mark.parametrize(
    "page",
    [
        b"<!DOCTYPE html><a href='x'>swarmllm</a>",
        b"[]",
        b'{"files": {"a": 1}}',
        b'{"files": [{"filename": 3}]}',
        b'{"files": [{"filename": "swarmllm-1-py3-none-any.whl", "requires-python": 3}]}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_another_answer_is_told_from_an_index(index: FaultyServer, page: bytes) -> None:
    index.files[PAGE] = page
    result = ask(index, "--check")
    assert result.exit_code == EXIT_FAILED
    assert result.output.startswith("Error: http://127.0.0.1:")
    assert "did not answer as an index does" in result.output


def test_an_index_without_the_project_says_so(index: FaultyServer) -> None:
    assert "has no project called swarmllm" in ask(index, "--check").output
    put(index, wheel("9.0.0", yanked=True))
    result = ask(index, "--check")
    assert (result.exit_code, "has no version of swarmllm for Python" in result.output) == (EXIT_FAILED, True)


def test_a_redirect_is_not_followed(index: FaultyServer) -> None:
    index.redirects[PAGE] = "/elsewhere/"
    put(index, wheel("9.0.0"))
    result = ask(index, "--check")
    assert (result.exit_code, "redirects; give" in result.output) == (EXIT_FAILED, True)
    assert [asked.path for asked in index.asked] == [PAGE]


def test_the_answer_may_not_be_large(index: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_module, "ANSWER_MAX_BYTES", 2**20)
    index.files[PAGE] = b" " * (2**20 + 1)
    result = ask(index, "--check")
    assert (result.exit_code, "answered with more than 1 MiB" in result.output) == (EXIT_FAILED, True)


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_index_that_stalls_is_given_up(
    index: FaultyServer, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(version_module, "DEADLINE_S", 0.2)
    put(index, wheel("9.0.0"))
    is_over = threading.Event()

    def stall(handler: Handler, data: bytes) -> None:
        if has_begun:
            handler.reply(200, data[:10], {"Content-Length": str(len(data))})
        is_over.wait(30)

    index.faults.append(stall)
    try:
        result = ask(index, "--check")
    finally:
        is_over.set()
    assert (result.exit_code, "did not answer within 0.2 s" in result.output) == (EXIT_FAILED, True)


def test_faults_of_the_index_are_told_in_a_sentence(index: FaultyServer) -> None:
    put(index, wheel("9.0.0"))
    index.faults.append(lambda handler, _: handler.reply(503, b"busy"))
    assert "answered with status 503" in ask(index, "--check").output
    index.faults.append(lambda handler, _: handler.reset())
    result = ask(index, "--check")
    assert (result.exit_code, "cannot be asked: " in result.output) == (EXIT_FAILED, True)


@pytest.mark.parametrize("url", ["index", "ftp://a/simple", "http://", "http://\x7f/", "https://u:p@/"])
def test_an_address_that_is_none_is_wrong_usage(url: str) -> None:
    result = CliRunner().invoke(main, ["version", "--check", "--index", url])
    assert (result.exit_code, "an address like https://" in result.output) == (EXIT_USAGE, True)


def test_a_password_in_the_address_is_used_and_not_shown(index: FaultyServer) -> None:
    index.url = index.url.replace("//", "//me:secret@")
    index.files[PAGE] = b""
    result = ask(index, "--check")
    assert result.exit_code == EXIT_FAILED
    assert "secret" not in result.output
    assert index.asked[0].authorization == "Basic bWU6c2VjcmV0"
