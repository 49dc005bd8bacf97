"""Small GGUF files, well-formed and otherwise, written by hand: the reader under test must not be its own
witness."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

F32 = 0
ALIGNMENT = 32


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """With its type tag: str, bool, int (u32), float (f32), list of str or int."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + string(content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    kind = 8 if isinstance(content[0], str) else 5
    items = b"".join(string(item) if kind == 8 else struct.pack("<i", item) for item in content)
    return struct.pack("<IIQ", 9, kind, len(content)) + items


LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Tiny Llama 2",
    "llama.block_count": 2,
    "llama.embedding_length": 8,
    "llama.context_length": 64,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


def tensors(n_layers: int = 2) -> dict[str, bytes]:
    """Name -> data of an f32 vector; no two alike."""
    names = ["token_embd.weight", "rope_freqs.weight", "output_norm.weight", "output.weight"]
    names[1:1] = [f"blk.{layer}.{part}.weight" for layer in range(n_layers) for part in ("attn_q", "ffn_up")]
    return {name: struct.pack("<8f", *([float(i)] * 8)) for i, name in enumerate(names)}


def gguf_bytes(
    keys: dict[str, Any] | None = None,
    data: dict[str, bytes] | None = None,
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = ALIGNMENT,
) -> bytes:
    keys = LLAMA if keys is None else keys
    data = tensors() if data is None else data
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(data) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    head += b"".join(string(key) + value(content) for key, content in keys.items())
    body = b""
    for name, raw in data.items():
        body += b"\0" * (-len(body) % alignment)
        head += string(name) + struct.pack("<IQIQ", 1, len(raw) // 4, F32, len(body))
        body += raw
    return head + b"\0" * (-len(head) % alignment) + body


def write_gguf(path: Path, **parts: Any) -> Path:
    path.write_bytes(gguf_bytes(**parts))
    return path
