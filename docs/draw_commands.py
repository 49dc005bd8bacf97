"""Writes docs/commands.md from the commands themselves: `python docs/draw_commands.py`.

The page is what `swarmllm COMMAND --help` prints, command by command, so it cannot promise an option that is
not there; tests/test_docs.py compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from swarmllm.cli.main import main  # noqa: E402

PAGE = ROOT / "docs" / "commands.md"
WIDTH = 100
HEAD = """# Commands

Written by `python docs/draw_commands.py` from the commands' own help; a test compares. Every command
prints JSON with `--json` where it has something to print, and ends with 0 done, 1 failed, 2 wrong usage,
3 no daemon answers, 4 the daemon refused, 5 a newer version is there (`version --check`).
"""


def commands(
    command: click.Command, words: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The command and all below it, in the order of their help."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=words[-1])
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*words, name))


def help_text(words: tuple[str, ...], command: click.Command) -> str:
    settings = main.context_settings
    context: click.Context | None = None
    for word in words[:-1]:
        context = click.Context(click.Group(), parent=context, info_name=word, **settings)
    context = click.Context(
        command,
        parent=context,
        info_name=words[-1],
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **settings,
    )
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def page() -> str:
    sections = [
        f"{'#' * min(3, 1 + len(words))} {' '.join(words)}\n\n```\n{help_text(words, command)}\n```\n"
        for words, command in commands(main, ("swarmllm",))
    ]
    return "\n".join([HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
