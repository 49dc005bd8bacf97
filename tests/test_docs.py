"""The documents agree with the code: what they draw, link to and tell people to type exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import pytest
from test_house import LAYERS, PACKAGES

from swarmllm.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "proto" / "wire.md"])


def page_name(page: object) -> str:
    return str(page.relative_to(ROOT)) if isinstance(page, Path) else ""


@cache
def drawing_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_architecture_page_is_drawn_from_this_source() -> None:
    drawn = drawing_script("draw_architecture").page_with_drawing()
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert page == drawn, "the source has changed; run: python docs/draw_architecture.py"


def test_packages_are_drawn_in_the_order_in_which_they_may_import() -> None:
    drawn = [each for each in drawing_script("draw_architecture").TOP_DOWN if each in LAYERS]
    assert drawn == [each for each in LAYERS if each in drawn]


def test_the_page_of_architectures_is_drawn_from_the_table() -> None:
    drawn = drawing_script("draw_architectures").page_with_table()
    page = (ROOT / "docs" / "architectures.md").read_text("utf-8")
    assert page == drawn, "the table has changed; run: python docs/draw_architectures.py"


def test_the_page_of_commands_is_what_they_say_of_themselves() -> None:
    written = drawing_script("draw_commands").page()
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    # How lines are broken is click's affair.
    assert page.split() == written.split(), "a command has changed; run: python docs/draw_commands.py"


DEFINES = re.compile(
    r"^ *(?:(?:async )?def|class) (\w+)|^ *(?:self\.)?(\w+)(?:: [^=\n]+)? = |^    (\w+): ", re.MULTILINE
)
REFERS = re.compile(r"(?:\([Ss]ee `?|\b[Ss]ee `)([A-Za-z_][\w./]*)")


def test_what_docstrings_refer_to_is_there() -> None:
    """By `(see name)`: a module, a page, a function, a class or a field."""
    sources = {
        file: file.read_text("utf-8")
        for package in PACKAGES.values()
        for file in (ROOT / package).rglob("*.py")
    }
    named = {name for file in sources for name in (file.stem, file.parent.name)}
    named |= {name for source in sources.values() for found in DEFINES.findall(source) for name in found}
    named |= {file.stem for file in (*PAGES, *(ROOT / "workers").rglob("*.c"))}
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, source in sources.items()
        for name in REFERS.findall(source)
        if re.split(r"[./]", re.sub(r"\.(py|md|c)?$", "", name))[-1] not in named
    ]
    assert not missing


def test_every_module_says_what_it_is() -> None:
    silent = [
        line for line in drawing_script("draw_architecture").drawing().splitlines() if line.endswith("| - |")
    ]
    assert silent == []


def relative_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" not in target and not target.startswith(("#", "mailto:")):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    assert [link for link in relative_links(page) if not (page.parent / link).exists()] == []


FOLDERS = "swarmllm|workers|proto|tests|bench|docs"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_lists_every_document() -> None:
    listed = set(relative_links(ROOT / "docs" / "README.md"))
    there = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there <= listed


def shown_commands(page: Path) -> Iterator[str]:
    """Lines of code blocks that call `swarmllm`, and inline code that does."""
    text = page.read_text("utf-8")
    for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL):
        yield from re.findall(r"^\s*(?:\$ )?(swarmllm .+?)(?:   .*|#.*)?$", block, re.MULTILINE)
    yield from re.findall(r"(?<!`)`(swarmllm [^`\n]+)`(?!`)", text)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_commands_that_a_page_shows_exist(page: Path) -> None:
    for line in shown_commands(page):
        command: click.Command = main
        for word in shlex.split(line)[1:]:
            if isinstance(command, click.Group) and not word.startswith("-"):
                context = click.Context(command)
                found = command.get_command(context, word)
                assert found is not None, f"{line}: there is no {word}"
                command = found
            elif word.startswith("--"):
                options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
                assert word.partition("=")[0] in {*options, "--help", "--version"}, f"{line}: no {word}"


def test_make_targets_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    readme = (ROOT / "README.md").read_text("utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)(?:$|`)", readme, re.MULTILINE))
    assert {"run", "test"} <= named <= targets
