"""How a command fails: a sentence on stderr that says what to do next, and an exit code that a script can
tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from swarmllm.errors import InvalidRequest, SwarmLLMError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_INTERRUPTED = 130


class CommandFailed(click.ClickException):
    """The daemon, or something it relies on, could not do what was asked."""

    exit_code = EXIT_FAILED


class WrongUsage(CommandFailed):
    """What was typed cannot be meant."""

    exit_code = EXIT_USAGE


class DaemonUnreachable(CommandFailed):
    """Nobody answers at the API address."""

    exit_code = EXIT_UNREACHABLE


class RequestRefused(CommandFailed):
    """The daemon answered that the request is wrong: an unknown model, layers it cannot cut, too many
    requests."""

    exit_code = EXIT_REFUSED


@contextmanager
def failures_explained() -> Iterator[None]:
    """What fails in this process, without a daemon, as a command says it."""
    try:
        yield
    except InvalidRequest as error:
        raise RequestRefused(error.message) from None
    except SwarmLLMError as error:
        raise CommandFailed(error.message) from None
