"""The HTTP edge: OpenAI's API, administration, health. The only room that knows quart and h11.

`open_api` serves a `Node` on a loopback port; everything below it is split by job: `schema` says what a body
may look like, `chat_request` turns one into a prompt and sampling (or refuses it by name), `chat_reply`
writes answers, `tool_calls` finds calls in text, `feed` runs a generation beside its HTTP response, `guard`
refuses strangers.
"""

from __future__ import annotations

from swarmllm.api.http.app import create_app
from swarmllm.api.http.endpoint import open_api

__all__ = ["create_app", "open_api"]
