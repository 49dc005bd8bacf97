"""A daemon in the test's own event loop, whose tasks a test can reach."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import trio
from daemon_process import toml
from deadlines import DEADLINE_S

from swarmllm.config import Config
from swarmllm.config_sources import load_config
from swarmllm.daemon import DaemonInfo, open_daemon
from swarmllm.sd_notify import ServiceManager
from swarmllm.supervision import Supervision


class Daemon:
    def __init__(self, supervision: Supervision, where: DaemonInfo, http: httpx.AsyncClient) -> None:
        self.supervision = supervision
        self.where = where
        self.http = http

    async def chat(self, *, stream: bool = False) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "guide", "messages": messages, "max_tokens": 4, "stream": stream}
        return await self.http.post("/v1/chat/completions", json=body)

    async def answers(self) -> None:
        """Asked until it does: what failed may be on its way back."""
        with trio.fail_after(DEADLINE_S):
            while (await self.chat()).status_code != 200:  # noqa: ASYNC110
                await trio.sleep(0.05)

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(DEADLINE_S):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.02)


def config_of(
    folder: Path, name: str, load: list[str], bootstrap: list[str] | None = None, **tables: dict[str, Any]
) -> Config:
    file = folder / f"{name}.toml"
    file.write_text(toml(name, folder / name, load, bootstrap or [], tables))
    return load_config(file)


@asynccontextmanager
async def daemon(
    config: Config, prepare: Callable[[Supervision], None] = lambda supervision: None
) -> AsyncIterator[Daemon]:
    with Supervision().active() as supervision:
        prepare(supervision)
        running = open_daemon(config, lambda: config, ServiceManager({}))
        async with (
            running as where,
            httpx.AsyncClient(base_url=where.api_url, trust_env=False, timeout=DEADLINE_S) as http,
        ):
            yield Daemon(supervision, where, http)
