"""Takes the command line of llama.cpp's `llama-server`, and has a running daemon answer at its port.

Nothing of a request or an answer is changed: bytes are passed on as they are. What is set here is what that
server is told on its command line (model, context, sampling, template, names), and the names under which the
suite asks for its only model, because llama.cpp ignores them. Which of the daemons in SWARMLLM_URLS answers
depends on what cannot be set while a daemon runs (slots, keys, origins).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

URLS = json.loads(os.environ["SWARMLLM_URLS"])
"""By kind: plain, slots, keyed, local."""
PLAIN_SLOTS = 2
MODELS = Path(os.environ["SWARMLLM_STAND_INS"])
NAMES = (
    "davinci-002",
    "gpt-3.5-turbo-instruct",
    "gpt-3.5-turbo",
    "gpt-4.1",
    "text-embedding-3-small",
    "test",
)
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
EFFORTS = {"on": "medium", "auto": "medium", "off": "none"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--temp", type=float, default=0.8)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--alias", default="")
    parser.add_argument("--hf-repo", default="")
    parser.add_argument("--ctx-size", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--n-predict", type=int)
    parser.add_argument("--chat-template", default="")
    parser.add_argument("--chat-template-file")
    parser.add_argument("--reasoning", choices=EFFORTS)
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--reranking", action="store_true")
    parser.add_argument("--pooling", default="cls")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--cors-origins", default="")
    known, _ = parser.parse_known_args()
    return known


class Daemon:
    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What is answered, read to its end; of several lines the last. Raises HTTPError."""
        data = json.dumps(body or {}).encode() if method != "GET" else None
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            lines = answer.read().splitlines()
        return json.loads(lines[-1]) if lines else None


def kind_of(asked: argparse.Namespace) -> str:
    if asked.api_key:
        return "keyed"
    if asked.cors_origins:
        return "local"
    return "slots" if asked.parallel > PLAIN_SLOTS else "plain"


def model_file(asked: argparse.Namespace) -> Path:
    """The stand-in for what is asked for."""
    if asked.reranking or asked.embedding:
        return MODELS / f"{'rank' if asked.reranking else asked.pooling}.gguf"
    return MODELS / ("infill.gguf" if "infill" in asked.hf_repo else "words.gguf")


def preset(asked: argparse.Namespace) -> dict[str, Any]:
    said: dict[str, Any] = {"sampling": {"temperature": asked.temp, "seed": asked.seed}}
    if asked.n_predict and asked.n_predict > 0:
        said["max_tokens"] = asked.n_predict
    if asked.chat_template_file:
        said["template"] = Path(asked.chat_template_file).read_text()
    elif asked.chat_template:
        said["template"] = TEMPLATES.get(asked.chat_template, asked.chat_template)
    if asked.reasoning:
        said["reasoning_effort"] = EFFORTS[asked.reasoning]
    return said


def prepare(daemon: Daemon, asked: argparse.Namespace) -> None:
    """The model that is asked for, and no other."""
    path = str(model_file(asked))
    first, *others = (asked.alias or "model").split(",")
    names = {*others, *NAMES} - {first}
    # That server divides its context among its slots, unless they share it.
    n_ctx = max(16, asked.ctx_size // (1 if asked.kv_unified else asked.parallel))
    is_encoder = asked.reranking or asked.embedding
    is_there = False
    for model in daemon.call("GET", "/api/admin/models")["models"]:
        is_as_asked = (model["name"], model["path"], {*model["further_names"]}) == (first, path, names)
        if is_as_asked and (is_encoder or (model["loaded"] and model["settings"]["n_ctx"] == n_ctx)):
            is_there = True  # loading it again takes longer than most tests
            continue
        at = f"/api/admin/models/{model['name']}"
        if model["loaded"]:
            daemon.call("POST", f"{at}/unload")
        # All of its names, of which the file's is the last.
        for name in (*model["further_names"], model["name"]):
            daemon.call("DELETE", f"/api/admin/models/{name}")
    if not is_there:
        daemon.call("POST", "/api/admin/models", {"path": path, "name": first})
        for name in sorted(names):
            daemon.call("POST", f"/api/admin/models/{first}/alias", {"name": name})
        if not is_encoder:
            daemon.call("POST", f"/api/admin/models/{first}/load", {"n_ctx": n_ctx})
    if not is_encoder:
        for name in (first, *names):
            daemon.call("POST", f"/api/admin/models/{name}/preset", preset(asked))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def serve(asked: argparse.Namespace, url: str) -> None:
    """Until SIGTERM."""
    host, _, there = url.removeprefix("http://").partition(":")
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_node, to_node = await asyncio.open_connection(host, int(there))
        await asyncio.gather(pump(reader, to_node), pump(from_node, writer))

    hosts = [each.strip("[] ") for each in asked.host.split(",")]
    server = await asyncio.start_server(connected, hosts, asked.port)
    await ended.wait()
    server.close()


def main() -> None:
    asked = options()
    kind = kind_of(asked)
    daemon = Daemon(URLS[kind], asked.api_key)
    said = json.dumps({**vars(asked), "port": 0, "host": ""})
    last = MODELS / f"last-{daemon.url.rpartition(':')[2]}.json"
    is_prepared = last.exists() and last.read_text() == said
    if asked.hf_repo and not is_prepared:  # without it is a router over several servers
        last.unlink(missing_ok=True)
        prepare(daemon, asked)
        last.write_text(said)
    asyncio.run(serve(asked, daemon.url))


if __name__ == "__main__":
    main()
