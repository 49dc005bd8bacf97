"""`swarmllm version`: what is installed and, where that is asked for, whether an index has a newer one.

The index is asked as pip and uv ask it (the simple repository API, in JSON), for one page of JSON. None is
built in: nothing is asked unless somebody types `--check` and says, here or to pip or uv, which index.
"""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from swarmllm import __version__
from swarmllm.cli.client import EXIT_OUTDATED, CommandFailed, WrongUsage, is_http_url
from swarmllm.cli.display import print_json
from swarmllm.cli.options import json_option
from swarmllm.errors import reason_of

if TYPE_CHECKING:
    from packaging.version import Version

PROJECT = "swarmllm"
DEADLINE_S = 10.0
"""For name, connection and answer together."""
ANSWER_MAX_BYTES = 4 * 2**20
ACCEPT = "application/vnd.pypi.simple.v1+json"
INDEX_VARIABLES = ("SWARMLLM_INDEX", "UV_DEFAULT_INDEX", "PIP_INDEX_URL")


@click.command(
    short_help="Show the installed version; compare it with an index's.",
    epilog="""\b
Examples:
  swarmllm version
  swarmllm version --check --index https://index.example/simple

\b
Exit codes:
  0 this is the newest  1 the index does not say  2 wrong usage
  5 a newer one is there
""",
)
@click.option("--check", is_flag=True, help="Ask the package index for the newest version.")
@click.option(
    "--index",
    metavar="URL",
    envvar=INDEX_VARIABLES,
    help="The index to ask, as pip and uv know it (or SWARMLLM_INDEX, UV_DEFAULT_INDEX, PIP_INDEX_URL).",
)
@json_option
def version(check: bool, index: str | None, as_json: bool) -> None:
    """Show which version is installed here. The running node's is in `swarmllm status`.

    Nothing is asked of anybody without --check. With it, the package index is asked once for its page of
    this project; pre-releases and withdrawn versions do not count, nor those for other versions of Python.
    """
    shown: dict[str, Any] = {"version": __version__, "python": platform.python_version()}
    if not check:
        print_json(shown) if as_json else click.echo(f"SwarmLLM {__version__}, Python {shown['python']}")
        return
    if not index:
        raise WrongUsage(
            "No index to ask: give --index URL, or set SWARMLLM_INDEX. It is the address that "
            "`pip install --index-url` takes."
        )
    newest = newest_of(read_index(index), _without_secrets(index))
    if as_json:
        print_json(shown | {"newest": str(newest), "is_newest": newest <= _installed()})
    elif newest <= _installed():
        click.echo(f"SwarmLLM {__version__} is the newest: the index has {newest}.")
    else:
        click.echo(f"SwarmLLM {__version__} is installed, and {newest} is there. See docs/upgrading.md.")
    if newest > _installed():
        click.get_current_context().exit(EXIT_OUTDATED)


def _installed() -> Version:
    from packaging.version import Version

    return Version(__version__)


def _without_secrets(index: str) -> str:
    """For people: an index's address may have a user and a password in it."""
    parts = urlsplit(index)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def read_index(index: str) -> bytes:
    """The index's page of this project. Raises WrongUsage, CommandFailed."""
    import trio

    shown = _without_secrets(index) if is_http_url(index) else ""
    if not shown:
        raise WrongUsage("The index must be an address like https://index.example/simple.")
    try:
        return trio.run(_read, f"{index.rstrip('/')}/{PROJECT}/", shown)
    except trio.TooSlowError:
        raise CommandFailed(f"{shown} did not answer within {DEADLINE_S:g} s.") from None


async def _read(url: str, shown: str) -> bytes:
    import httpx
    import trio

    # A compressed answer could be small here and large in memory.
    headers = {"Accept": ACCEPT, "Accept-Encoding": "identity", "User-Agent": f"swarmllm/{__version__}"}
    content = bytearray()
    too_much = CommandFailed(f"{shown} answered with more than {ANSWER_MAX_BYTES >> 20} MiB.")
    try:
        with trio.fail_after(DEADLINE_S):
            async with (
                httpx.AsyncClient(headers=headers, timeout=None, follow_redirects=False) as http,
                http.stream("GET", url) as answer,
            ):
                if answer.is_redirect:
                    raise CommandFailed(f"{shown} redirects; give the address to which it does.")
                if answer.status_code == 404:
                    raise CommandFailed(f"{shown} has no project called {PROJECT}.")
                if answer.status_code != 200:
                    raise CommandFailed(f"{shown} answered with status {answer.status_code}.")
                async for data in answer.aiter_raw():
                    content += data
                    if len(content) > ANSWER_MAX_BYTES:
                        # httpx nests generators; on a closed connection they end instead of being dropped.
                        await answer.aclose()
    except (httpx.InvalidURL, UnicodeError):
        raise WrongUsage(f"{shown} is not an address like https://index.example/simple.") from None
    except httpx.HTTPError as error:
        if len(content) > ANSWER_MAX_BYTES:
            raise too_much from None
        raise CommandFailed(f"{shown} cannot be asked: {reason_of(error)}.") from None
    if len(content) > ANSWER_MAX_BYTES:
        raise too_much
    return bytes(content)


class _IndexFile(msgspec.Struct, rename="kebab"):
    filename: str
    requires_python: str | None = None
    yanked: bool | str = False
    """Withdrawn, or why it is."""


class _Page(msgspec.Struct):
    files: list[_IndexFile]


def newest_of(page: bytes, shown: str) -> Version:
    """The newest version on an index's page that can be installed here. Raises CommandFailed."""
    try:
        files = msgspec.json.decode(page, type=_Page).files
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CommandFailed(
            f"{shown} did not answer as an index does (JSON of the simple repository API)."
        ) from None
    found = [version for file in files if (version := _installable(file)) is not None]
    if not found:
        raise CommandFailed(f"{shown} has no version of {PROJECT} for Python {platform.python_version()}.")
    return max(found)


def _installable(file: _IndexFile) -> Version | None:
    """None for what pip would not choose by itself."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.utils import (
        InvalidSdistFilename,
        InvalidWheelFilename,
        parse_sdist_filename,
        parse_wheel_filename,
    )

    name = file.filename
    try:
        is_wheel = name.endswith(".whl")
        project, found = parse_wheel_filename(name)[:2] if is_wheel else parse_sdist_filename(name)
        needs = SpecifierSet(file.requires_python or "")
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidSpecifier):
        return None
    here = ".".join(map(str, sys.version_info[:3]))
    if project != PROJECT or file.yanked or found.is_prerelease or not needs.contains(here):
        return None
    return found
