"""A model that is arithmetic, and the part of a worker pool that runs it.

The arithmetic is chosen so that mistakes show: every layer adds what earlier rows of the same request left
behind (a KV cache, kept per layer and position) and multiplies, so a row that is lost, repeated out of
place, computed by the wrong layers or in the wrong order changes every token after it. All values are small
integers, exact in float32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

import msgspec
import numpy as np
import trio

from swarmllm.errors import ContextFull, WorkerError
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.models.manifest import Manifest
from swarmllm.models.model_files import FileState
from swarmllm.pictures import Picture
from swarmllm.pipeline.stage.compute import ForwardCall, GenerateCall
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.fingerprints import drawn_tokens, encode_fingerprint
from swarmllm_proto.ipc import (
    Effort,
    FinishReason,
    GenerateDone,
    KeptRows,
    Sampling,
    TextPlace,
    Token,
    TokenAgain,
    TokenLogprob,
)
from swarmllm_proto.tensors import Tensor

N_LAYERS = 12
N_EMBD = 4
PRIME = 997
N_CTX = 4096


def fake_entry(name: str = "arithmetic", cut_alignment: int = 1) -> CatalogueEntry:
    manifest = Manifest(
        name=name,
        architecture="arithmetic",
        n_layers=N_LAYERS,
        n_embd=N_EMBD,
        n_vocab=PRIME,
        context_length=N_CTX,
        cut_alignment=cut_alignment,
        whole_reason="",
        tied_embedding=False,
        size_bytes=1,
        shards=(),
    )
    return CatalogueEntry(manifest.model_id, name, Path("/nowhere/model.gguf"), manifest, FileState(1, 1))


@dataclass
class _Slot:
    rows: dict[int, list[int]] = field(default_factory=dict)
    """What the rows of a request left behind, from its first one on, by layer."""
    names: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    """By (scope, layers)."""
    journals: dict[int, Tensor] = field(default_factory=dict)
    """What has left the layers before this one, or come to those from it on; NaN before its first row."""
    n_sampled: int = 0
    sampling: Sampling | None = None


class FakePool:
    """The part of WorkerPool that pipelines use, for a model of this width."""

    def __init__(self, *ranges: str, n_embd: int = N_EMBD) -> None:
        self.n_embd = n_embd
        self.ranges = tuple(LayerRange.parse(text) for text in ranges)
        self.slots: dict[str, _Slot] = {}
        self.kept: dict[tuple[str, str, bytes], dict[int, list[int]]] = {}
        """Rows of blocks by layer, by (scope, layers, name)."""
        self.calls: list[tuple[Any, ...]] = []
        self.before_forward: Callable[[int, LayerRange], Awaitable[None]] | None = None
        """(position, layers); may wait or raise."""
        self.checked: list[Sampling] = []
        """For whose grammars it was asked."""
        self.keeps_journals = True
        self.ends: frozenset[int] = frozenset()
        """Tokens that end a text."""
        self.held: set[str] = set()
        self.n_vocab = PRIME
        """As the model's manifest has it."""
        self.tells_fingerprints = True
        self.kernels = "plain"
        """Its class."""
        self.cuts: list[LayerRange] = []
        """That were asked for."""

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return self.ranges

    def context_sizes(self) -> dict[str, int]:
        return {}

    def cut(self, model_id: str, layers: LayerRange, *, if_idle: bool = False) -> None:
        self.cuts.append(layers)

    def kernel_class(self, model_id: str) -> str:
        return self.kernels

    def can_recode_now(self) -> bool:
        return False

    async def recode_picture(self, picture: Picture, *, side_max: int = 0) -> bytes:
        raise WorkerError("this pool decodes nothing")

    async def tokenize(
        self,
        model: ModelFile,
        *,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: list[dict[str, Any]] | None = None,
        effort: Effort | None = None,
        template: str = "",
        place: TextPlace = "whole",
    ) -> Tensor:
        await trio.lowlevel.checkpoint()
        return np.array([ord(character) % PRIME for character in text or ""], np.int32)

    async def pieces(self, model: ModelFile, tokens: Tensor) -> tuple[bytes, ...]:
        await trio.lowlevel.checkpoint()
        return tuple(f"{token} ".encode() for token in tokens)

    async def end_tokens(self, model: ModelFile) -> frozenset[int]:
        await trio.lowlevel.checkpoint()
        return self.ends

    async def detokenize(self, model: ModelFile, tokens: Tensor) -> str:
        await trio.lowlevel.checkpoint()
        return "".join(chr(token) for token in tokens)

    async def check_grammar(self, model: ModelFile, sampling: Sampling) -> None:
        await trio.lowlevel.checkpoint()
        self.checked.append(sampling)

    async def embed(self, model: ModelFile, tokens: Tensor) -> Tensor:
        await trio.lowlevel.checkpoint()
        self.calls.append(("embed", len(tokens)))
        return _embedded(tokens, self.n_embd)

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> SimpleNamespace:
        request_id, layers, want = call["request_id"], call["layers"], call["want"]
        position, tensor = call["position"], call["tensor"]
        slot = self.slots.setdefault(request_id, _Slot())
        await trio.lowlevel.checkpoint()
        if self.before_forward is not None:
            await self.before_forward(position, layers)
        self.calls.append(("forward", str(layers), position, len(tensor), want))
        if position + len(tensor) > N_CTX:
            raise ContextFull("the context is full")
        rows = _embedded(tensor, self.n_embd) if tensor.dtype == np.int32 else tensor
        hidden = self._run(slot, layers, position, rows)
        if want == "hidden" and self.keeps_journals:
            _keep(slot.journals, layers.end, position, hidden)
        if tensor.dtype != np.int32:
            _keep(slot.journals, layers.start, position, rows)
        token, piece = None, b""
        again: tuple[TokenAgain, ...] = ()
        if want == "again":
            again = self._again(slot, call, hidden)
        if want == "token":
            if slot.sampling is None:
                slot.n_sampled = len(call.get("generated", ()))
            slot.sampling = call.get("sampling") or slot.sampling
            assert slot.sampling is not None, "sampling comes with the first token"
            token, piece = self._sample(slot, request_id, hidden[-1])
            token = self._fingerprinted(token, slot.sampling, hidden[-1])
        return SimpleNamespace(
            tensor=hidden if want == "hidden" else None,
            token=token,
            piece=piece,
            compute_s=0.001,
            scores=(),
            onward=False,
            again=again,
        )

    @asynccontextmanager
    async def generate(self, model: ModelFile, **call: Unpack[GenerateCall]) -> AsyncIterator[FakeStream]:
        stream = FakeStream(self, model, call)
        try:
            yield stream
        finally:
            self.slots.pop(call["request_id"], None)

    async def cancel(self, model_id: str, request_id: str) -> None:
        await trio.lowlevel.checkpoint()
        self.held.discard(request_id)
        if (slot := self.slots.pop(request_id, None)) is not None:
            self._keep(slot)

    async def hold(self, model_id: str, request_id: str, hold_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("hold", request_id))
        if request_id in self.slots:
            self.held.add(request_id)

    async def resume(
        self,
        model: ModelFile,
        *,
        request_id: str,
        resumes: str,
        n_rows: int,
        ranges: Sequence[LayerRange],
    ) -> tuple[KeptRows, ...]:
        await trio.lowlevel.checkpoint()
        assert request_id not in self.slots
        if resumes not in self.held:
            return tuple(KeptRows() for _ in ranges)
        self.held.remove(resumes)
        slot = self.slots[request_id] = self.slots.pop(resumes)
        slot.sampling, slot.n_sampled = None, 0
        slot.rows = {layer: rows[:n_rows] for layer, rows in slot.rows.items()}
        return tuple(
            KeptRows(
                min(len(slot.rows.get(layer, ())) for layer in range(layers.start, layers.end)),
                min(n_rows, _from_the_start(slot.journals.get(layers.end))),
            )
            for layers in ranges
        )

    async def read_journal(
        self, model: ModelFile, *, request_id: str, end: int, position: int, n_rows: int
    ) -> Tensor:
        await trio.lowlevel.checkpoint()
        self.calls.append(("read_journal", end, position, n_rows))
        slot = self.slots.get(request_id)
        rows = slot.journals.get(end) if slot is not None else None
        if rows is None or position + n_rows > len(rows) or np.isnan(rows[position]).any():
            raise WorkerError("not all of these rows are there", kind="position_gap")
        return rows[position : position + n_rows]

    async def name_prefix(
        self, model: ModelFile, *, request_id: str, layers: LayerRange, names: bytes, scope: str
    ) -> int:
        """Rows are kept when their request is cancelled, for any later one with the same names."""
        await trio.lowlevel.checkpoint()
        slot = self.slots.setdefault(request_id, _Slot())
        slot.names[scope, str(layers)] = [names[at : at + 32] for at in range(0, len(names), 32)]
        has_begun = any(slot.rows.get(layer) for layer in range(layers.start, layers.end))
        n_blocks = 0
        for i, name in enumerate(slot.names[scope, str(layers)]):
            kept = self.kept.get((scope, str(layers), name))
            if kept is None or (has_begun and kept != _block(slot.rows, layers, i)):
                break
            if not has_begun:
                for layer, rows in kept.items():
                    slot.rows.setdefault(layer, []).extend(rows)
            n_blocks = i + 1
        return n_blocks

    def _keep(self, slot: _Slot) -> None:
        for (scope, layers), names in slot.names.items():
            wanted = LayerRange.parse(layers)
            for i, name in enumerate(names):
                block = _block(slot.rows, wanted, i)
                if all(len(rows) == BLOCK_TOKENS for rows in block.values()):
                    self.kept[scope, layers, name] = block

    def _run(self, slot: _Slot, layers: LayerRange, position: int, rows: Tensor) -> Tensor:
        # What is no small integer came from a liar, and may become anything.
        with np.errstate(invalid="ignore"):
            hidden = rows.astype(np.int64)
        for layer in range(layers.start, layers.end):
            known = slot.rows.setdefault(layer, [])
            del known[position:]
            if len(known) < position:
                raise WorkerError(f"layer {layer} has no row {len(known)}", kind="position_gap")
            left_behind = hidden.sum(axis=1) % PRIME
            memory = sum(known) + np.cumsum(left_behind) - left_behind
            known.extend(left_behind.tolist())
            hidden = (hidden * (layer + 3) + memory[:, None] + layer + np.arange(self.n_embd)) % PRIME
        return hidden.astype(np.float32)

    def _again(self, slot: _Slot, call: ForwardCall, hidden: Tensor) -> tuple[TokenAgain, ...]:
        slot.sampling, found = call.get("sampling"), []
        assert slot.sampling is not None, "sampling comes with every call"
        first, told = len(call.get("generated", ())), call.get("scored", ())
        for index, (row, said) in enumerate(zip(hidden, told, strict=True)):
            slot.n_sampled = first + index
            token, piece = self._sample(slot, call["request_id"], row)
            own = TokenLogprob(said, 0.0 if said == token.token else -9.0, piece)
            ends = token.finish_reason == "stop"
            fingerprint = self._fingerprint(first + index, said, slot.sampling, row)
            found.append(TokenAgain(token.token, ends, (own, *token.logprobs[1:]), fingerprint or b""))
        return tuple(found)

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        fingerprint = self._fingerprint(token.index, token.token, sampling, row)
        return token if fingerprint is None else msgspec.structs.replace(token, fingerprint=fingerprint)

    def _fingerprint(self, index: int, token: int, sampling: Sampling, row: Tensor) -> bytes | None:
        """As if the token's logit was the largest, 0, and that of each other one below it."""
        if sampling.fingerprint_key is None or not self.tells_fingerprints:
            return None
        drawn = drawn_tokens(sampling.fingerprint_key, index, self.n_vocab)
        with np.errstate(invalid="ignore"):
            sums = (drawn * 7 + int(np.nan_to_num(row).astype(np.int64).sum())) % PRIME
        logits = np.where(drawn == token, 0.0, -1 - sums / 64).astype(np.float32)
        return encode_fingerprint(logits, 0.0, 0.0)

    def _sample(self, slot: _Slot, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        assert slot.sampling is not None
        # Depends on how often the slot has sampled, as a seeded sampler does: sampling twice shows.
        token_id = (int(row.sum()) + slot.n_sampled) % PRIME
        index, slot.n_sampled = slot.n_sampled, slot.n_sampled + 1
        piece, stops = f"{token_id} ", slot.sampling.stop
        if piece in stops:
            stopped = {"finish_reason": "stop", "stopped_by": stops.index(piece)}
            return Token(id=0, request_id=request_id, index=index, token=token_id, **stopped), b""
        finish: FinishReason | None = "length" if slot.n_sampled >= slot.sampling.max_tokens else None
        if token_id in self.ends and not slot.sampling.ignore_eos:
            finish = "stop"
        # There is one token that it could be.
        n_logprobs = 1 + min(1, slot.sampling.top_logprobs) if slot.sampling.logprobs else 0
        token = Token(
            id=0,
            request_id=request_id,
            index=index,
            token=token_id,
            finish_reason=finish,
            compute_s=0.001,
            logprobs=(TokenLogprob(token_id, 0.0, piece.encode()),) * n_logprobs,
        )
        return token, piece.encode()


class FakeStream:
    def __init__(self, pool: FakePool, model: ModelFile, call: GenerateCall) -> None:
        self.done: GenerateDone | None = None
        self._steps = self._run(pool, model, call)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> tuple[Token, bytes]:
        return await self._steps.__anext__()

    async def _run(
        self, pool: FakePool, model: ModelFile, call: GenerateCall
    ) -> AsyncIterator[tuple[Token, bytes]]:
        position, rows = 0, call["tokens"]
        n_prompt = len(rows) - call.get("n_generated", 0)
        generated = tuple(rows[n_prompt:].tolist())
        while True:
            result = await pool.forward(
                model,
                request_id=call["request_id"],
                layers=LayerRange(0, N_LAYERS),
                position=position,
                tensor=rows,
                want="token",
                sampling=call["sampling"],
                n_prompt_tokens=n_prompt,
                generated=generated,
            )
            yield result.token, result.piece
            if result.token.finish_reason:
                return
            position, rows = position + len(rows), np.array([result.token.token], np.int32)


def _block(rows: dict[int, list[int]], layers: LayerRange, index: int) -> dict[int, list[int]]:
    """Of every layer, as far as it goes."""
    start = index * BLOCK_TOKENS
    return {
        layer: rows.get(layer, [])[start : start + BLOCK_TOKENS] for layer in range(layers.start, layers.end)
    }


def _keep(journals: dict[int, Tensor], boundary: int, position: int, rows: Tensor) -> None:
    journal = journals.get(boundary, np.full((position, rows.shape[1]), np.nan, np.float32))
    if position <= len(journal):
        journals[boundary] = np.concatenate((journal[:position], rows))


def _from_the_start(journal: Tensor | None) -> int:
    return 0 if journal is None or np.isnan(journal[:1]).any() else len(journal)


def _embedded(tokens: Tensor, n_embd: int) -> Tensor:
    return ((tokens[:, None].astype(np.int64) * 7 + np.arange(n_embd)) % PRIME).astype(np.float32)


async def uncut(prompt: str, n_tokens: int, n_embd: int = N_EMBD) -> str:
    """What one pool with every layer answers."""
    pool, entry = FakePool(f"0:{N_LAYERS}", n_embd=n_embd), fake_entry()
    model = ModelFile(entry.model_id, entry.path)
    tokens = await pool.tokenize(model, text=prompt)
    text = b""
    async with pool.generate(
        model, request_id="uncut", tokens=tokens, sampling=Sampling(max_tokens=n_tokens)
    ) as stream:
        async for _, piece in stream:
            text += piece
    return text.decode()
