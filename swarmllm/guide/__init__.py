"""The bundled model "guide", its draft, its projector, and everything that makes them.

Importing this package gives the paths of the three files and costs nothing; `corpus`, `train` and the
modules beside it are needed only to make the files again.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["DRAFT_PATH", "GUIDE_PATH", "GUIDE_TEMPERATURE", "GUIDE_TYPICAL_P", "PROJECTOR_PATH"]

GUIDE_PATH = Path(__file__).with_name("guide.gguf")
"""The guide: a 12-layer llama chat model of at most 10 MB that answers questions about SwarmLLM."""

DRAFT_PATH = Path(__file__).with_name("guide-draft.gguf")
"""Its draft for speculative decoding: the same tokenizer, one layer."""

PROJECTOR_PATH = Path(__file__).with_name("mmproj-guide.gguf")
"""Its projector: a vision encoder that reads digits, shapes, bar charts and strips of layers."""

GUIDE_TEMPERATURE = 0.3
"""For requests to the guide that name none. At 1 it mixes two of its answers three times as often
(docs/guide-model.md)."""

GUIDE_TYPICAL_P = 0.35
"""For requests to the guide that name none. Where the guide is unsure how to begin, its likeliest beginning
may lead to a mixture; this keeps the beginnings whose surprise is nearest to the expected one."""
