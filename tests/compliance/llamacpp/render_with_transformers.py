"""Renders conversations as transformers does: `python render_with_transformers.py FOLDER < asked.json`.

Prints JSON: for each template (`*.jinja`) of the folder the text of each conversation, null where that
fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def rendered(template: str, conversation: dict[str, Any], tokens: dict[str, str]) -> str | None:
    try:
        (text,), _ = render_jinja_template(
            conversations=[conversation["messages"]],
            tools=conversation["tools"],
            chat_template=template,
            add_generation_prompt=True,
            **tokens,
        )
    except Exception:  # a template can raise whatever Python can
        return None
    return str(text)


def main() -> None:
    asked = json.load(sys.stdin)
    json.dump(
        {
            path.stem: [rendered(path.read_text(), each, asked["tokens"]) for each in asked["conversations"]]
            for path in sorted(Path(sys.argv[1]).glob("*.jinja"))
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
