"""Reloads the configuration on SIGHUP, and applies what may change while the node runs.

The definitions in `swarmllm.config` say which keys those are. Sockets, workers and identities were made from
the others: a change there is reported, and takes effect after a restart. A configuration that cannot be used
changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import trio

from swarmllm.config import TABLES, Config, keys_of
from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.sd_notify import ServiceManager

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


def merge(old: Config, new: Config) -> tuple[Config, list[str], list[str]]:
    """(what counts from now on, the keys that changed with it, those that count after a restart)"""
    applied, waiting, tables = [], [], {}
    for table in TABLES:
        before, after = getattr(old, table), getattr(new, table)
        changes = {}
        for key, field in keys_of(table).items():
            value = getattr(after, key)
            if value == getattr(before, key):
                continue
            if field.metadata["reload"]:
                changes[key] = value
                applied.append(f"{table}.{key}")
            else:
                waiting.append(f"{table}.{key}")
        tables[table] = dataclasses.replace(before, **changes)
    return Config(**tables), applied, waiting


async def reload_on_sighup(
    config: Config,
    reread: Callable[[], Config],
    apply: Callable[[Config], Awaitable[None]],
    manager: ServiceManager,
    *,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """For ever; `reread` blocks, it and `apply` raise ConfigError or InvalidRequest before they change
    anything."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            manager.tell(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
            try:
                merged, applied, waiting = merge(config, await trio.to_thread.run_sync(reread))
                await apply(merged)
            except (ConfigError, InvalidRequest) as error:
                log.error("settings refused at SIGHUP: %s; nothing is changed", error.message)  # noqa: TRY400 (it says it all)
            else:
                config = merged
                log.warning("settings read at SIGHUP: %s", _account(applied, waiting))
            manager.tell(READY=1)


def _account(applied: list[str], waiting: list[str]) -> str:
    parts = [f"changed: {', '.join(applied)}" if applied else "nothing is changed"]
    if waiting:
        parts.append(f"after a restart: {', '.join(waiting)}")
    return "; ".join(parts)
