"""Writes the table of request fields in docs/http.md from the bodies' types: `python docs/draw_fields.py`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec.inspect

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from swarmllm.api.anthropic.messages import MessagesRequest  # noqa: E402
from swarmllm.api.http.fields import members  # noqa: E402
from swarmllm.api.llamacpp.completion import NativeCompletion  # noqa: E402
from swarmllm.api.ollama.endpoints import (  # noqa: E402
    EMPTY_IN_GENERATE,
    NEVER_TRUE,
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
)
from swarmllm.api.openai import chat_request, completions, responses_request  # noqa: E402
from swarmllm.api.openai.completions import CompletionRequest  # noqa: E402
from swarmllm.api.openai.embeddings import EmbeddingRequest  # noqa: E402
from swarmllm.api.openai.rerank import RerankRequest  # noqa: E402
from swarmllm.api.openai.responses_request import ResponsesRequest  # noqa: E402
from swarmllm.api.openai.schema import ChatRequest  # noqa: E402

PAGE = ROOT / "docs" / "http.md"
BEGIN, END = "<!-- fields: written by docs/draw_fields.py -->", "<!-- fields end -->"
BODIES: tuple[tuple[str, type, Collection[str]], ...] = (
    ("`/v1/chat/completions`", ChatRequest, chat_request.NEUTRAL),
    ("`/v1/completions`", CompletionRequest, completions.NEUTRAL),
    ("`/v1/responses`", ResponsesRequest, responses_request.NEUTRAL),
    ("`/v1/embeddings`", EmbeddingRequest, ()),
    ("`/v1/rerank`", RerankRequest, ()),
    ("`/completion`", NativeCompletion, ()),
    ("`/v1/messages`", MessagesRequest, ()),
    ("`/api/chat`", OllamaChat, NEVER_TRUE),
    ("`/api/generate`", OllamaGenerate, (*NEVER_TRUE, *EMPTY_IN_GENERATE)),
    ("`/api/embed`", OllamaEmbed, ()),
)


def structures(kind: msgspec.inspect.Type, path: str) -> Iterator[tuple[str, msgspec.inspect.StructType]]:
    """Every object that a body may hold, with its place."""
    for each in members(kind):
        if isinstance(each, msgspec.inspect.ListType):
            yield from structures(each.item_type, f"{path}[]")
        elif isinstance(each, msgspec.inspect.StructType):
            yield path, each
            for field in each.fields:
                yield from structures(
                    field.type, f"{path}.{field.encode_name}" if path else field.encode_name
                )


def table() -> str:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for endpoint, kind, neutral in BODIES:
        for path, structure in structures(msgspec.inspect.type_info(kind), ""):
            ignored: frozenset[str] = getattr(structure.cls, "ignored", frozenset())
            refused: frozenset[str] = getattr(structure.cls, "refused", frozenset())
            if getattr(structure.cls, "refuses_unknown", False):
                refused = frozenset({"*"})
            told = dict.fromkeys(ignored, "ignored") | dict.fromkeys(refused, "refused")
            told |= dict.fromkeys(getattr(structure.cls, "neutral", ()), "neutral value only")
            told |= dict.fromkeys(
                refused & set(getattr(structure.cls, "refused_unless", ())), "neutral value only"
            )
            if not path:
                own = [field.encode_name for field in structure.fields]
                told = dict.fromkeys(own, "honoured") | told | dict.fromkeys(neutral, "neutral value only")
            for name, what in told.items():
                place = f"{path}.{name}" if path else name
                found.setdefault((place, what), {})[endpoint] = None
    rows: dict[tuple[str, str], list[str]] = {}
    for (place, what), endpoints in found.items():
        shown = "all" if len(endpoints) == len(BODIES) else ", ".join(endpoints)
        rows.setdefault((shown, what), []).append(f"`{place}`")
    lines = ["| field | endpoint | what happens |", "|---|---|---|"]
    for (shown, what), places in sorted(rows.items(), key=lambda row: (row[0][1], row[0][0])):
        lines.append(f"| {', '.join(sorted(places))} | {shown} | {what} |")
    return "\n".join(lines)


def page_with_table() -> str:
    head, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), "utf-8")
