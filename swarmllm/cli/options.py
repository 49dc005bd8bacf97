"""Options that several commands share, and how the daemon is found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_API_URL = "http://127.0.0.1:8800"

Command = TypeVar("Command", bound=Callable[..., object])


class GpuLayersParam(click.IntRange):
    """0 to 65535, or auto."""

    name = "layers"

    def __init__(self) -> None:
        super().__init__(0, 65535)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


def api_option(command: Command) -> Command:
    """`--api URL`, passed on as `api_url`: the flag, SWARMLLM_API, the default data folder's daemon, port
    8800."""
    return click.option(
        "--api",
        "api_url",
        envvar="SWARMLLM_API",
        default=find_api_url,
        metavar="URL",
        help=f"The node's HTTP endpoint (or SWARMLLM_API).  [default: the local node, {DEFAULT_API_URL}]",
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text.")(
        command
    )


def image_option(command: Command) -> Command:
    help_text = "A picture that goes with the question (PNG, JPEG, WebP, GIF). May be given several times."
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--image", "images", metavar="FILE", multiple=True, type=kind, help=help_text)(
        command
    )


def audio_option(command: Command) -> Command:
    help_text = "A sound that goes with the question (WAV, MP3, FLAC). May be given several times."
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--audio", "sounds", metavar="FILE", multiple=True, type=kind, help=help_text)(
        command
    )


def data_dir_option(command: Command) -> Command:
    """Of commands that work on the data folder, daemon or not."""
    help_text = "The node's data folder.  [default: as configured]"
    return click.option("--data-dir", metavar="DIR", help=help_text)(command)


def config_option(command: Command) -> Command:
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file to read instead of ~/.config/swarmllm/config.toml.",
    )(command)


def find_api_url() -> str:
    """The address a daemon with the default data folder has written down, else the default port."""
    from swarmllm.config import default_data_dir

    try:
        return str(json.loads((default_data_dir(os.environ) / "daemon.json").read_text("utf-8"))["api_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_API_URL
