"""How far apart the fingerprints and tokens of honest last stages are, for kinds of kernels, batches and KV.

    python -m bench.honest_heads [--tokens 20000] [--seconds 3600] [--seed 9] [--kernels NAME=FOLDER ...]

Last stages of the bundled model give tokens after texts cut at random from the repository's pages, row by
row, with each of these settings, also while the worker computes other requests; an auditor samples them
again as a check does. Prints how far the fingerprints are apart (`swarmllm.pipeline.check.fingerprints`), how
many stretches are above their limits, and how far the tokens are from those that the auditor's seeds give.
`--kernels`: as in `bench.honest_rows`. `--whole`: whole models, which get the tokens. `--save FILE` keeps
every token's figures.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import trio

from bench.checked_rows import libraries, named_folder
from bench.honest_rows import SETTINGS, VARIANTS, computed, texts
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.fingerprints import distance
from swarmllm.pipeline.check.reported_logprobs import ReportedLogprobs, logprob_distance
from swarmllm.pipeline.check.thresholds import (
    LOGITS_OTHER_KV,
    LOGITS_SAME_KV,
    TOKENS_OTHER_KV,
    TOKENS_SAME_KV,
    of_tokens,
)
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.fingerprints import decode_fingerprint
from swarmllm_proto.ipc import Sampling, TokenAgain
from swarmllm_proto.tensors import Tensor

N_GIVEN, N_TOLD = 96, 64
KEY: Final = 77
STRETCHES: Final = (8, 16, 32, 64)
N_BESIDE: Final = 3


Computed = Sequence[Mapping[int, float]]
"""Log-probabilities of some tokens, for each of an answer."""


class ReportedTokens(NamedTuple):
    ids: list[int]
    fingerprints: Tensor
    """f32 [n, N_VALUES]"""
    logprobs: list[ReportedLogprobs]


@dataclass
class Head:
    """Of one worker: its last layers, or all of them."""

    pool: WorkerPool
    model: ModelFile
    layers: LayerRange
    kv_type: str = "f16"

    async def given(self, request_id: str, rows: Tensor, n: int) -> None:
        for at in range(0, N_GIVEN - 1, n):
            await self.pool.forward(
                self.model,
                request_id=request_id,
                layers=self.layers,
                position=at,
                tensor=rows[at : min(at + n, N_GIVEN - 1)],
                want="none",
                n_prompt_tokens=N_GIVEN,
            )

    async def reported(self, rows: Tensor, sampling: Sampling, n: int) -> ReportedTokens:
        tokens, fingerprints, logprobs = [], [], []
        await self.given("told", rows, n)
        for at in range(N_GIVEN - 1, N_GIVEN - 1 + N_TOLD):
            result = await self.pool.forward(
                self.model,
                request_id="told",
                layers=self.layers,
                position=at,
                tensor=rows[at : at + 1],
                want="token",
                sampling=sampling if not tokens else None,
                n_prompt_tokens=N_GIVEN,
            )
            assert result.token is not None
            tokens.append(result.token.token)
            fingerprints.append(decode_fingerprint(bytes(result.token.fingerprint or b"")))
            logprobs.append(result.token.logprobs)
        await self.pool.cancel(self.model.model_id, "told")
        return ReportedTokens(tokens, np.stack(fingerprints), logprobs)

    async def again(
        self, rows: Tensor, reported: Sequence[int], sampling: Sampling, n: int
    ) -> tuple[TokenAgain, ...]:
        await self.given("again", rows, n)
        result = await self.pool.forward(
            self.model,
            request_id="again",
            layers=self.layers,
            position=N_GIVEN - 1,
            tensor=rows[N_GIVEN - 1 : N_GIVEN - 1 + N_TOLD],
            want="again",
            sampling=sampling,
            n_prompt_tokens=N_GIVEN,
            scored=tuple(reported),
        )
        await self.pool.cancel(self.model.model_id, "again")
        return result.again


def logprobs_of(computed: Sequence[TokenAgain]) -> Computed:
    return [{reported.token: reported.logprob for reported in each.logprobs} for each in computed]


@dataclass
class KindResult:
    """Of one kind of head: an item for each answer."""

    reported: list[Tensor] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)
    regrouped: list[Tensor] = field(default_factory=list)
    apart: list[Tensor] = field(default_factory=list)
    """Of drawn tokens; NaN of greedy ones."""
    nats: list[Tensor] = field(default_factory=list)
    """By which the likeliest token is likelier."""
    differs: list[Tensor] = field(default_factory=list)
    logprobs: list[tuple[Sequence[ReportedLogprobs], Computed, Computed]] = field(default_factory=list)
    """That were told, computed again, and computed again in other batches."""

    def add(
        self, reported: ReportedTokens, again: Sequence[TokenAgain], regrouped: Sequence[TokenAgain]
    ) -> None:
        self.logprobs.append((reported.logprobs, logprobs_of(again), logprobs_of(regrouped)))
        self.reported.append(reported.fingerprints)
        self.again.append(np.stack([decode_fingerprint(each.fingerprint) for each in again]))
        self.regrouped.append(np.stack([decode_fingerprint(each.fingerprint) for each in regrouped]))
        self.apart.append(np.array([np.nan if each.apart is None else each.apart for each in again]))
        self.nats.append(np.array([each.logprobs[1].logprob - each.logprobs[0].logprob for each in again]))
        pairs = zip(reported.ids, again, strict=True)
        self.differs.append(np.array([token != each.token for token, each in pairs]))


def print_table(found: Mapping[str, KindResult]) -> None:
    """The largest distances of stretches of so many tokens, and those that are above the least limit of the
    pair's types of KV, or above the one that is left when the auditor has computed twice."""
    sizes = " | ".join(f"{n} tokens" for n in STRETCHES)
    print(f"| honest | tokens | {sizes} | above least | wrong | other tokens | most apart | most nats |")
    print("|---" * (8 + len(STRETCHES) - 1) + "|")
    for what, each in sorted(found.items()):
        allowed = LOGITS_OTHER_KV if "KV in" in what else LOGITS_SAME_KV
        largest, n_above, n_wrong = [], 0, 0
        for n in STRETCHES:
            measured = []
            for reported, again, other in zip(each.reported, each.again, each.regrouped, strict=True):
                for at in range(0, N_TOLD, n):
                    part, limits = slice(at, at + n), of_tokens(allowed, n)
                    measured.append(distance(again[part], reported[part]))
                    n_above += measured[-1] > limits.least
                    n_wrong += measured[-1] > limits.limit(distance(again[part], other[part]))
            largest.append(f"{max(measured):.4f}")
        differs, logprob_distance = np.stack(each.differs), np.stack(each.apart)
        is_drawn = ~np.isnan(logprob_distance)
        nats = np.where(is_drawn, 0.0, np.stack(each.nats))
        print(
            f"| {what} | {differs.size} | {' | '.join(largest)} | {n_above} | {n_wrong} "
            f"| {100 * differs.mean():.1f} % | {np.max(logprob_distance, where=is_drawn, initial=0.0):.4f} "
            f"| {nats.max():.3f} |"
        )


def print_logprobs(found: Mapping[str, KindResult]) -> None:
    """The same of log-probabilities: the largest sizes and shifts
    (`swarmllm.pipeline.check.reported_logprobs`), where only the token's own is told and where those of the
    20 likeliest are too, and how many stretches are above one of the least limits."""
    sizes = " | ".join(f"{n} tokens" for n in STRETCHES)
    for n_told, which in ((1, "of the token"), (21, "and of the 20 likeliest")):
        print(f"\n| honest, log-probability {which}: size, shift | {sizes} | above least |")
        print("|---" * (2 + len(STRETCHES)) + "|")
        for what, each in sorted(found.items()):
            allowed = TOKENS_OTHER_KV if "KV in" in what else TOKENS_SAME_KV
            largest, n_above = [], 0
            for n in STRETCHES:
                measured = [
                    logprob_distance([t[:n_told] for t in reported[at : at + n]], again[at : at + n])
                    for reported, again, _ in each.logprobs
                    for at in range(0, N_TOLD, n)
                ]
                limits = allowed.of_tokens(n).least
                n_above += sum(off.size > limits.size or off.shift > limits.shift for off in measured)
                most = [max(values) for values in zip(*measured, strict=True)]
                largest.append(", ".join(f"{value:.4f}" for value in most))
            print(f"| {what} | {' | '.join(largest)} | {n_above} |")


async def main(n_tokens: int, seconds: float, seed: int, builds: Sequence[tuple[str, Path]]) -> None:
    drawn = random.Random(seed)
    started_s = time.monotonic()
    found: dict[str, KindResult] = {}
    with tempfile.TemporaryDirectory() as name:
        entry = Catalogue(Path(name) / "models.sqlite").ensure(GUIDE_PATH, "guide")
        model = ModelFile(entry.model_id, entry.path)
        n_layers = entry.manifest.n_layers
        before, layers = LayerRange(0, 2 * n_layers // 3), LayerRange(2 * n_layers // 3, n_layers)
        if options.whole:
            layers = LayerRange(0, n_layers)
        async with AsyncExitStack() as stack:
            heads: dict[str, Head] = {}

            async def start(what: str, settings: Mapping[str, Any], path: Path | None = None) -> None:
                chosen = WorkerSettings(cache_dir=Path(name) / "cache", n_ctx=2048, n_slots=6, **settings)
                pool = WorkerPool(chosen, Path(name) / f"run{len(heads)}")
                await stack.enter_async_context(pool.running())
                heads[what] = Head(pool, model, layers, settings.get("kv_type", "f16"))
                await pool.load(model, layers)

            for what, settings in SETTINGS.items():
                await start(what, settings)
            for build, kernels in builds:
                for what, settings in VARIANTS.items():
                    with libraries(kernels):
                        await start(build + what, {"kernels": "ggml", **settings})
            auditor = next(iter(heads.values()))
            if not options.whole:
                await auditor.pool.load(model, before)
            tokens = np.concatenate([await auditor.pool.tokenize(model, text=text) for text in texts()])

            async def came_in(at: int) -> Tensor:
                part = tokens[at : at + N_GIVEN + N_TOLD]
                return part if options.whole else await computed(auditor.pool, model, before, part, 128)

            n_done = 0
            while n_done < n_tokens and time.monotonic() - started_s < seconds:
                rows = await came_in(drawn.randrange(len(tokens) - N_GIVEN - N_TOLD))
                sampling = Sampling(
                    temperature=drawn.choice((0.0, 1.0, 1.0)),
                    seed=drawn.randrange(2**32),
                    max_tokens=2**20,
                    ignore_eos=True,
                    logprobs=True,
                    top_logprobs=20,
                    fingerprint_key=KEY,
                )
                n = drawn.choice((128, 32, 64))
                for what, head in heads.items():
                    is_beside = drawn.random() < 0.25
                    other = await came_in(drawn.randrange(len(tokens) - N_GIVEN - N_TOLD))
                    async with trio.open_nursery() as nursery:
                        for number in range(N_BESIDE if is_beside else 0):
                            nursery.start_soon(head.given, f"{number}", other, drawn.choice((128, 7)))
                        reported = await head.reported(rows, sampling, n)
                    for number in range(N_BESIDE):
                        await head.pool.cancel(model.model_id, f"{number}")
                    again = await auditor.again(rows, reported.ids, sampling, 128)
                    regrouped = await auditor.again(rows, reported.ids, sampling, 32)
                    found.setdefault(what + (", beside others" if is_beside else ""), KindResult()).add(
                        reported, again, regrouped
                    )
                    n_done += N_TOLD
    if options.save:
        np.savez(
            options.save,
            **{
                f"{what}/{part}": np.stack(getattr(each, part))
                for what, each in found.items()
                for part in ("reported", "again", "regrouped", "apart", "nats", "differs")
            },
        )
    print_table(found)
    print_logprobs(found)
    print(f"\n{n_done} tokens in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=9, help="of the texts")
    parser.add_argument("--kernels", nargs="*", type=named_folder, default=(), metavar="NAME=FOLDER")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    trio.run(main, options.tokens, options.seconds, options.seed, options.kernels)
