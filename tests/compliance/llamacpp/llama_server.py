"""Takes the command line of llama.cpp's `llama-server`, and loads the guide in the daemon at SWARMLLM_URL.

Nothing of a request or an answer is changed: bytes are passed on as they are. What is set here is what that
server is told on its command line (context, sampling, template), and the names under which the suite asks for
its only model, because llama.cpp ignores them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = os.environ["SWARMLLM_URL"]
NAMES = ("davinci-002", "gpt-3.5-turbo-instruct", "gpt-4.1", "text-embedding-3-small", "test")
TIMEOUT_S = 60.0
TEMPLATES = {
    "chatml": """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "command-r": """{% for message in messages %}<|START_OF_TURN_TOKEN|>
{%- if message.role == "system" %}<|SYSTEM_TOKEN|>{% elif message.role == "user" %}<|USER_TOKEN|>
{%- else %}<|CHATBOT_TOKEN|>{% endif %}{{ message.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}""",
    "llama3": """{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
}
"""Those that server has by name, as far as the suite asks for them; any other value is a template itself."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--alias", default="")
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--n-predict", type=int)
    parser.add_argument("--chat-template", default="")
    parser.add_argument("--chat-template-file")
    known, _ = parser.parse_known_args()
    return known


def call(path: str, body: dict[str, Any]) -> None:
    """Raises HTTPError. Reads a load to its end."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        answer.read()


def preset(asked: argparse.Namespace) -> dict[str, Any]:
    said: dict[str, Any] = {"sampling": {"temperature": asked.temp, "seed": asked.seed}}
    if asked.n_predict and asked.n_predict > 0:
        said["max_tokens"] = asked.n_predict
    if asked.chat_template_file:
        said["template"] = Path(asked.chat_template_file).read_text()
    elif asked.chat_template:
        said["template"] = TEMPLATES.get(asked.chat_template, asked.chat_template)
    return said


def prepare(asked: argparse.Namespace) -> None:
    with contextlib.suppress(urllib.error.HTTPError):  # nothing is loaded at first
        call("/api/admin/models/guide/unload", {})
    # That server divides its context among its slots.
    call("/api/admin/models/guide/load", {"n_ctx": max(16, asked.ctx_size // asked.parallel)})
    names = ["guide", *filter(None, asked.alias.split(",")), *NAMES]
    for name in names[1:]:
        with contextlib.suppress(urllib.error.HTTPError):  # it has that name already
            call("/api/admin/models/guide/alias", {"name": name})
    for name in names:
        call(f"/api/admin/models/{name}/preset", preset(asked))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(port: int) -> None:
    host, _, there = URL.removeprefix("http://").partition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_connection(host, int(there))
        await asyncio.gather(pump(reader, to_node), pump(from_node, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    asked = options()
    prepare(asked)
    asyncio.run(serve(asked.port))


if __name__ == "__main__":
    main()
