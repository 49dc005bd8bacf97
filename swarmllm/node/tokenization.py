"""Tokenizes, detokenizes and renders chat templates without generating anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry
from swarmllm.node.infill import FILE, REPOSITORY, SNIPPET, FileText, InfillTexts, infill_prompt
from swarmllm.node.model_access import RequestModels
from swarmllm.pipeline.origin.generation import Prompt, token_ids
from swarmllm.pipeline.origin.prompts import Prompts
from swarmllm.workerpool import ModelFile, WorkerPool
from swarmllm_proto.ipc import Effort

Messages = list[dict[str, Any]]

ENDING_CHARACTERS = 64
QUESTION: Messages = [{"role": "user", "content": "?"}]
TOOLS: Messages = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL_ID = "abcdefghi"
"""Mistral's templates want nine characters."""
CONVERSATION: Messages = [
    *QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "x", "tool_call_id": CALL_ID},
]


class Texts:
    def __init__(self, pool: WorkerPool, prompts: Prompts, models: RequestModels) -> None:
        self._pool = pool
        self._prompts = prompts
        self._models = models
        self._samples: dict[tuple[str, int, Effort | None, str], str] = {}

    async def tokenize(self, model: str, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text as it is; `add_special`: with what the model wants around each text."""
        file = _file(await self._models.model_for_texts(model))
        tokens: list[int] = (await self._pool.tokenize(file, text=text)).tolist()
        if not add_special:
            # The worker always adds them; what an empty text becomes shows which they are.
            special = (await self._pool.tokenize(file, text="")).tolist()
            if tokens[: len(special)] == special:
                tokens = tokens[len(special) :]
        return tokens

    async def detokenize(self, model: str, tokens: list[int]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        entry = await self._models.model_for_texts(model)
        return await self._pool.detokenize(_file(entry), token_ids(entry, tokens, "tokens"))

    async def pieces(self, model: str, tokens: list[int]) -> list[bytes]:
        """What each token stands for, special ones spelt out; not always whole characters. Raises
        InvalidRequest for ids outside the vocabulary."""
        entry = await self._models.model_for_texts(model)
        ids = token_ids(entry, tokens, "tokens")
        found = list(await self._pool.pieces(_file(entry), ids))
        # Special tokens add nothing to a text that is generated.
        silent = {tokens[i] for i, piece in enumerate(found) if not piece}
        spelt = {token: (await self.detokenize(model, [token])).encode() for token in sorted(silent)}
        return [piece or spelt[token] for piece, token in zip(found, tokens, strict=True)]

    async def end_tokens(self, model: str) -> frozenset[int]:
        """Those that end a text."""
        return await self._pool.end_tokens(_file(await self._models.model_for_texts(model)))

    async def infill(
        self,
        model: str,
        prefix: str,
        suffix: str,
        prompt: str,
        others: Sequence[FileText],
        *,
        n_answer: int | None,
    ) -> list[int]:
        """Token ids of a prompt for what stands between two texts, `prompt` behind the first. `others`: files
        of the same repository. `n_answer`: tokens of the context that are left for the answer; None: a
        quarter. Raises InvalidRequest where the model fills nothing in."""
        entry = await self._models.model_for_texts(model)
        file = _file(entry)
        tokens = await self._pool.infill_tokens(file)
        if tokens is None:
            raise InvalidRequest(f"{entry.name} has no tokens for filling in.", field="model")

        async def ids(text: str) -> list[int]:
            found: list[int] = (await self._pool.tokenize(file, text=text, place="later")).tolist()
            return found

        first: list[int] = (await self._pool.tokenize(file, text="")).tolist()
        context: list[int] = []
        if tokens.repository is not None:
            context = [tokens.repository, *await ids(REPOSITORY)]
        for other in others:
            head = await ids(SNIPPET)
            if tokens.file is not None:
                head = [tokens.file, *await ids(f"{other.name}\n")]
            context += [*head, *await ids(other.text)]
        if tokens.file is not None:
            context += [tokens.file, *await ids(FILE)]
        texts = InfillTexts(await ids(prefix), await ids(suffix), await ids(prompt), context)
        n_ctx = self._prompts.room_for(entry)
        n_ctx = min(n_ctx, entry.manifest.context_length or n_ctx)
        n_left = n_ctx // 4 if n_answer is None else max(1, n_answer)
        return infill_prompt(tokens, texts, first=first, n_max=n_ctx - n_left)

    async def count_tokens(self, model: str, prompt: Prompt) -> int:
        """How many tokens of context the prompt takes."""
        entry = await self._models.model_for_texts(model)
        return await self._prompts.count(prompt, entry)

    async def apply_template(
        self,
        model: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template: str = "",
        *,
        effort: Effort | None = None,
        is_to_answer: bool = True,
    ) -> str:
        """The text the model would read, by `template` or its own; `is_to_answer`: up to where the assistant
        speaks. Raises InvalidRequest where the template refuses."""
        file = _file(await self._models.model_for_texts(model))
        return await self._pool.apply_template(
            file, messages, tools, effort, template, is_to_answer=is_to_answer
        )

    async def prompt_ending(self, model: str, effort: Effort | None = None, template: str = "") -> str:
        """The last characters of any prompt of this model: what its answers go on from. "" where its
        template refuses."""
        return (await self._sample(model, QUESTION, None, effort, template))[-ENDING_CHARACTERS:]

    async def call_sample(self, model: str, template: str = "") -> str:
        """A conversation with a tool call as this model would read it: shows in which format it calls."""
        return await self._sample(model, CONVERSATION, TOOLS, None, template)

    async def _sample(
        self,
        model: str,
        messages: Messages,
        tools: Messages | None,
        effort: Effort | None,
        template: str,
    ) -> str:
        """Rendered once per model: templates do not decide by what was said."""
        entry = await self._models.model_for_texts(model)
        key = entry.model_id, len(messages), effort, template
        if key not in self._samples:
            try:
                self._samples[key] = await self._pool.apply_template(
                    _file(entry), messages, tools, effort, template
                )
            except InvalidRequest:
                self._samples[key] = ""
        return self._samples[key]


def _file(entry: CatalogueEntry) -> ModelFile:
    return ModelFile.of(entry)
