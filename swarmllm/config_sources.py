"""Reads settings from their sources: defaults, a TOML file, the environment, flags; the later one wins.

Values are checked by msgspec against the tables' annotations, the same way for every source; the environment
and flags bring text, which is turned into the field's type first. A key that does not exist is an error with
a suggestion.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from swarmllm.config import TABLES, Config, default_config_file, keys_of
from swarmllm.errors import ConfigError, reason_of

ENV_PREFIX = "SWARMLLM_"
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Defaults < TOML file < environment < flags (`{"api.port": 0}`; a value of None is no flag).

    `path` None reads the default file if there is one; a path that is given must exist. Raises ConfigError
    naming the key and where it came from.
    """
    env = os.environ if env is None else env
    values: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    origins: dict[str, str] = {}

    def put(table: str, key: str, value: object, origin: str) -> None:
        values[table][key] = value
        origins[f"{table}.{key}"] = origin

    for table, key, value, origin in [*_from_file(path, env), *_from_env(env), *_from_flags(flags or {})]:
        put(table, key, value, origin)
    return Config(**{table: _build(table, values[table], origins) for table in TABLES})


def _build(table: str, values: dict[str, Any], origins: Mapping[str, str]) -> Any:
    for key, value in values.items():
        kind = typing.get_type_hints(TABLES[table], include_extras=True)[key]
        try:
            values[key] = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            name = f"{table}.{key}"
            raise ConfigError(f"{name} ({origins[name]}): {error}", field=name) from None
    return TABLES[table](**values)


Setting = tuple[str, str, object, str]


def _from_file(path: Path | None, env: Mapping[str, str]) -> list[Setting]:
    file = path or default_config_file(env)
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if path is None:
            return []
        raise ConfigError(f"There is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"Cannot read {file}: {reason_of(error)}") from None
    found: list[Setting] = []
    for table, keys in tables.items():
        _check_known(table, TABLES, "table", str(file))
        if not isinstance(keys, dict):
            raise ConfigError(f"{table} in {file} is a table: write [{table}], keys below it.", field=table)
        for key, value in keys.items():
            _check_known(key, keys_of(table), f"key of [{table}]", str(file))
            found.append((table, key, value, str(file)))
    return found


def _from_env(env: Mapping[str, str]) -> list[Setting]:
    found: list[Setting] = []
    for name, text in env.items():
        table, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if not name.startswith(ENV_PREFIX) or not key or table not in TABLES:
            continue
        _check_known(key, keys_of(table), f"key of [{table}]", f"environment {name}")
        found.append((table, key, _parse(table, key, text), f"environment {name}"))
    return found


def _from_flags(flags: Mapping[str, object]) -> list[Setting]:
    found: list[Setting] = []
    for name, value in flags.items():
        table, _, key = name.partition(".")
        _check_known(table, TABLES, "table", "flag")
        _check_known(key, keys_of(table), f"key of [{table}]", "flag")
        if value is not None:
            found.append((table, key, _parse(table, key, value) if isinstance(value, str) else value, "flag"))
    return found


def _check_known(name: str, known: Mapping[str, object], what: str, origin: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
        raise ConfigError(f"{name!r} is not a {what} ({origin}). {hint}", field=name)


def _parse(table: str, key: str, text: str) -> object:
    """Text as the field's type; what does not parse is left for msgspec to refuse."""
    default = keys_of(table)[key].default
    if isinstance(default, tuple):
        return [item.strip() for item in text.split(",") if item.strip()]
    if isinstance(default, bool):
        return BOOLEANS.get(text.lower(), text)
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            return text
    return text
