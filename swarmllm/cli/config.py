"""`swarmllm config`: what the configuration is, where it comes from, whether it can be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from swarmllm.cli.client import WrongUsage
from swarmllm.cli.display import print_json
from swarmllm.cli.options import json_option
from swarmllm.config import Config, as_dict, default_config_file
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError

file_argument = click.argument("file", required=False, type=click.Path(path_type=Path))


@click.group(
    short_help="Show and check the configuration.",
    epilog="""\b
Examples:
  swarmllm config show
  swarmllm config show > config.toml
  swarmllm config check config.toml
""",
)
def config() -> None:
    """Show and check the configuration: the file, SWARMLLM_<TABLE>_<KEY> in the environment, and what comes
    of both. These commands ask no daemon; one that runs may have been started with other settings."""


@config.command(short_help="Show every setting as it would be used.")
@file_argument
@json_option
def show(file: Path | None, as_json: bool) -> None:
    """Show every setting as it would be used, as TOML that can be a configuration file."""
    settings = as_dict(_load(file))
    if as_json:
        print_json(settings)
    else:
        click.echo(as_toml(settings), nl=False)


@config.command(short_help="Show where the configuration file is, or would be.")
@json_option
def path(as_json: bool) -> None:
    """Show where the configuration file is, or would be."""
    file = default_config_file(os.environ)
    if as_json:
        print_json({"path": str(file), "exists": file.exists()})
        return
    click.echo(str(file))
    if not file.exists():
        click.echo("There is no such file yet: the defaults hold.", err=True)


@config.command(short_help="Say whether the configuration can be used.")
@file_argument
@json_option
def check(file: Path | None, as_json: bool) -> None:
    """Say whether FILE, by default the configuration file, can be used together with the environment."""
    from swarmllm.daemon_settings import check_settings

    checked = file or default_config_file(os.environ)
    settings = _load(file)
    try:
        check_settings(settings)
    except ConfigError as error:
        raise WrongUsage(error.message) from None
    if as_json:
        print_json({"path": str(checked), "ok": True})
    else:
        click.echo(f"{checked} can be used." if checked.exists() else "There is no file; the defaults hold.")


def _load(file: Path | None) -> Config:
    try:
        return load_config(file)
    except ConfigError as error:
        raise WrongUsage(error.message) from None


def as_toml(settings: dict[str, dict[str, object]]) -> str:
    """JSON's strings, numbers, booleans and arrays are TOML's; DEL is all that JSON leaves bare and TOML does
    not."""
    tables = []
    for table, keys in settings.items():
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
        tables.append("\n".join([f"[{table}]", *lines]) + "\n")
    return "\n".join(tables).replace("\x7f", "\\u007f")
