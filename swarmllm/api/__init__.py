"""The HTTP edge: OpenAI's API, administration, health. The only room that knows quart and h11.

`open_api` serves a `Node`. `http` is the server: connections, keys, errors, limits. `openai`, `anthropic`,
`ollama` and `llamacpp` are the dialects: each parses a body into a prompt and sampling, or refuses it with
the name of the field, and words the answer. `output` is what they share: it runs the generation beside its
HTTP response, and finds reasoning and tool calls in the text. `admin` is for operators. `bootstrap` is all
that a node without models serves.
"""

from __future__ import annotations

import importlib

from swarmllm.left_out import TEMPLATES, stands_in

# Before anything of this package imports quart.
with stands_in(TEMPLATES, "flask"):
    importlib.import_module("quart")

from swarmllm.api.http.app import create_app
from swarmllm.api.http.endpoint import open_api, open_bootstrap_api

__all__ = ["create_app", "open_api", "open_bootstrap_api"]
