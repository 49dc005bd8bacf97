"""In how many requests each way of cheating is found, and how honest nodes that are unlike each other fare.

    python -m bench.cheats [MODEL.gguf] [--seed 7] [--stages middle last] [--asked greedy ...] [--kernels ...]

Computes texts with the layers of a middle stage and of a last stage (of the guide by default), as honest
nodes and cheats would, and judges them as a check does. Then it plays requests of a stage that cheats in
every request, or in every tenth, until it gets no more work. It begins as a stranger, is the only stage that
is drawn, and the auditor has its layers. `--kernels` adds honest last stages with another build of ggml's
kernels (`bench.honest_rows` says how).
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import trio
from gguf import GGMLQuantizationType, GGUFReader

from bench.checked_rows import (
    N_PROMPT,
    N_ROWS,
    QUANTISATIONS,
    Bench,
    distances,
    libraries,
    named_folder,
    single_rows,
)
from bench.common.played_checks import COST, N_PLAYS, Answer, Check, TokenChecks, found, of_rows, of_tokens
from swarmllm.guide import GUIDE_PATH
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.fingerprints import OWN, distance
from swarmllm.pipeline.check.likelihood import is_far, with_apart
from swarmllm.pipeline.check.recompute import TokenTask, batches, regrouped, sample_here
from swarmllm.pipeline.check.reported_logprobs import ReportedLogprobs
from swarmllm.pipeline.check.sampling import (
    STRETCH_ROWS,
)
from swarmllm.pipeline.check.thresholds import (
    OTHER_KV,
    SAME_KV,
    TOKENS_OTHER_KV,
    TOKENS_SAME_KV,
    TOLERANCE,
    spread_with_kv,
)
from swarmllm.pipeline.check.verdict import (
    Sampled,
    TokenEvidence,
    fingerprints_of,
)
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.request import RequestContext
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.fingerprints import decode_fingerprint
from swarmllm_proto.ipc import Sampling, TokenLogprob
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

NODE, AUDITOR = node_id_named("node"), node_id_named("auditor")
N_QUESTION: Final = 48
TEMPERATURE: Final = 1.0
PLAIN: Final[Mapping[str, Any]] = {"flash_attention": "off"}


def row(where: str, what: str, figure: str, make: Callable[[], Check]) -> None:
    cost = COST[where.partition(",")[0]]
    always, sometimes = (found(make, cost, every, arguments.seed) for every in (1, 10))
    print(f"| {where} | {what} | {figure} | {always} | {sometimes} |", flush=True)


def fine_tuned(path: Path, to: Path, part: float) -> Path:
    """Every Q8_0 block's scale is changed by about so much."""
    to.write_bytes(path.read_bytes())
    drawn = np.random.default_rng(3)
    reader = GGUFReader(to, "r+")
    for tensor in reader.tensors:
        if tensor.tensor_type is GGMLQuantizationType.Q8_0:
            blocks = tensor.data.reshape(-1, 34)
            scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            changed = scales * (1 + part * drawn.standard_normal(scales.shape).astype(np.float32))
            blocks[:, :2] = changed.astype(np.float16).view(np.uint8)
    reader.data.flush()
    return to


def sent_instead(base: Sequence[Tensor], came_in: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    drawn = np.random.default_rng(1)
    yield "zeros", [np.zeros_like(rows) for rows in base]
    yield "passed through unchanged", list(came_in)
    yield "the row before instead of each row", [np.roll(rows, 1, axis=0) for rows in base]
    for part in (0.05, 0.01, 0.001):
        noisy = [rows * (1 + part * drawn.standard_normal(rows.shape)) for rows in base]
        yield f"noise of {100 * part:g} %", [rows.astype(np.float32) for rows in noisy]


async def middle_stage(bench: Bench, path: Path, folder: Path, layers: LayerRange) -> None:
    as_checked = list(batches(N_ROWS, N_PROMPT, 128))
    came_in = await bench.computed(await bench.tokens(), [LayerRange(0, layers.start)], single_rows())
    base = await bench.computed(came_in, [layers], single_rows())

    again = await bench.computed(came_in, [layers], list(regrouped(N_ROWS, N_PROMPT, 128)))
    in_q8_0 = await bench.computed(came_in, [layers], as_checked, kv_type="q8_0")
    between_batches = distances(base, again, came_in)
    between_types = distances(base, in_q8_0, came_in)
    all_stretches = range(len(between_types))

    def show(what: str, other: Sequence[Tensor], stretches: Sequence[int] = all_stretches) -> None:
        """What an auditor that has the layers finds, and one that asks a holder whose type of KV is
        another."""
        measured, by_other = distances(base, other, came_in), distances(in_q8_0, other, came_in)
        near = [min(measured[at], by_other[at]) for at in stretches]
        of_base = [measured[at] for at in stretches]
        spreads = [spread_with_kv(between_batches[at], between_types[at]) for at in stretches]
        row("middle", what, f"{min(near):.3f} to {max(near):.3f}", of_rows(near, spreads, SAME_KV))
        if min(near) <= TOLERANCE:
            where = "middle, a holder with another type of KV computes it"
            figure = f"{min(of_base):.3f} to {max(of_base):.3f}"
            holders = [between_batches[at] for at in stretches]
            row(where, what, figure, of_rows(of_base, holders, OTHER_KV))

    show("honest: KV in Q8_0", await bench.computed(came_in, [layers], single_rows(), kv_type="q8_0"))
    for what, rows in sent_instead(base, came_in):
        show(what, rows)
    for what, rows in sent_instead(in_q8_0, came_in):
        if "noise" in what:
            show(f"{what}, KV in Q8_0", rows)
    each = [LayerRange(at, at + 1) for at in range(layers.start, layers.end)]
    show("one of four layers left out", await bench.computed(came_in, [each[0], *each[2:]], as_checked))
    show("the last two of four left out", await bench.computed(came_in, each[:-2], as_checked))
    prompts = [*came_in[1:], came_in[0]]
    mixed = [
        np.concatenate((prompt[:N_PROMPT], rows[N_PROMPT:]))
        for prompt, rows in zip(prompts, came_in, strict=True)
    ]
    n_stretches, n_of_prompt = N_ROWS // STRETCH_ROWS, N_PROMPT // STRETCH_ROWS
    of_answer = [at for at in all_stretches if at % n_stretches >= n_of_prompt]
    show(
        "KV of another prompt (rows of the answer)",
        await bench.computed(mixed, [layers], as_checked),
        of_answer,
    )
    for what, kind in QUANTISATIONS.items():
        show(
            f"{what} instead of Q8_0",
            await bench.computed(came_in, [layers], as_checked, bench.quantised(path, what, kind)),
        )
    for part in (0.05, 0.2):
        tuned = fine_tuned(path, folder / f"tuned{part:g}.gguf", part)
        show(
            f"weights {100 * part:g} % off (another fine-tune)",
            await bench.computed(came_in, [layers], as_checked, tuned),
        )


class Head:
    """A worker with the layers of a last stage."""

    def __init__(
        self, bench: Bench, folder: Path, layers: LayerRange, path: Path | None, **settings: Any
    ) -> None:
        entry = bench.entry if path is None else bench._catalogue.ensure(path, path.stem.lower())
        self.model, self.layers = ModelFile(entry.model_id, entry.path), layers
        options = WorkerSettings(cache_dir=folder / "cache", n_ctx=512, n_slots=2, **settings)
        self.pool = WorkerPool(options, folder / f"head{random.randrange(10**9)}")

    async def forward(
        self,
        request_id: str,
        position: int,
        rows: Tensor,
        want: Any,
        sampling: Sampling | None,
        layers: LayerRange | None = None,
    ) -> Any:
        return await self.pool.forward(
            self.model,
            request_id=request_id,
            layers=layers or self.layers,
            position=position,
            tensor=rows,
            want=want,
            sampling=sampling if want == "token" else None,
            n_prompt_tokens=N_QUESTION,
        )

    async def again(
        self, rows: Tensor, reported: Sequence[int], stated: Sampling, *, is_regrouped: bool = False
    ) -> list[Sampled]:
        """What it samples from these rows, after the tokens that were told, as a check has it done."""
        evidence = TokenEvidence(rows, 0, (), tuple(reported), True)
        cut, end = self.layers.start, self.layers.end
        stages = (Stage(node_id=AUDITOR, start=0, end=cut), Stage(node_id=NODE, start=cut, end=end))
        view = RequestView(AUDITOR, AUDITOR, stages, prompt_here=True)
        context = RequestContext("cheats", self.model, rows.shape[1], 0, N_QUESTION, stated, view)
        task = TokenTask(context, evidence, 128, is_regrouped)
        return await sample_here(self.pool, task)


def asked(stated: Sampling, seed: int, key: int, *, ends: bool = False) -> Sampling:
    return msgspec.structs.replace(
        stated,
        seed=seed,
        max_tokens=arguments.answer_tokens,
        ignore_eos=not ends,
        logprobs=True,
        top_logprobs=20,
        fingerprint_key=key,
    )


async def answered(
    honest: Head,
    before: LayerRange,
    head: Head,
    prompt: Tensor,
    stated: Sampling,
    used: Sampling,
    other: Tensor | None,
) -> Answer:
    """The answer of `head`, which samples as `used` says, and what `honest` makes of the same rows."""
    tokens, position, is_ended = prompt, 0, False
    all_told: list[int] = []
    fingerprints: list[Tensor] = []
    logprobs: list[ReportedLogprobs] = []
    rows: list[Tensor] = []
    for index in range(arguments.answer_tokens):
        first = index == 0
        hidden = np.array((await honest.forward("before", position, tokens, "hidden", None, before)).tensor)
        own = hidden
        if first and other is not None:
            own = np.array((await honest.forward("other", 0, other, "hidden", None, before)).tensor)
            await honest.pool.cancel(honest.model.model_id, "other")
        reported = (await head.forward("told", position, own, "token", used if first else None)).token
        all_told.append(reported.token)
        fingerprints.append(decode_fingerprint(reported.fingerprint))
        logprobs.append(reported.logprobs)
        rows.append(hidden)
        if reported.finish_reason is not None:
            is_ended = reported.finish_reason == "stop"
            break
        position, tokens = position + len(tokens), np.array([reported.token], np.int32)
    for pool, model, name in (
        (honest.pool, honest.model, "before"),
        (head.pool, head.model, "told"),
    ):
        await pool.cancel(model.model_id, name)
    values = np.stack(fingerprints)
    return await audited(honest, np.concatenate(rows), all_told, values, stated, is_ended, tuple(logprobs))


async def audited(
    honest: Head,
    rows: Tensor,
    reported: list[int],
    fingerprints: Tensor,
    stated: Sampling,
    is_ended: bool,
    logprobs: tuple[ReportedLogprobs, ...] = (),
) -> Answer:
    again = await honest.again(rows, reported, stated)
    regrouped = await honest.again(rows, reported, stated, is_regrouped=True)
    key = stated.fingerprint_key
    assert key is not None
    return Answer(reported, fingerprints, rows, again, regrouped, key, is_ended, logprobs)


@dataclass
class LastStage:
    bench: Bench
    folder: Path
    layers: LayerRange
    honest: Head
    prompts: Sequence[Tensor]

    async def measured(
        self,
        stated: Sampling,
        path: Path | None = None,
        *,
        used: Sampling | None = None,
        seed: int = 0,
        of_other: bool = False,
        ends: bool = False,
        **settings: Any,
    ) -> list[Answer]:
        """With the layers of `path` where it is given; `used`: not the settings that were asked for;
        `of_other`: with the KV of another prompt."""
        head = Head(self.bench, self.folder, self.layers, path, **settings)
        before, answers = LayerRange(0, self.layers.start), []
        async with head.pool.running():
            await head.pool.load(head.model, self.layers)
            for number, prompt in enumerate(self.prompts):
                true = asked(stated, number, number, ends=ends)
                lies = asked(used or stated, seed + number, number, ends=ends)
                strange = self.prompts[number - 1] if of_other else None
                answers.append(await answered(self.honest, before, head, prompt, true, lies, strange))
        return answers

    async def told_instead(
        self, stated: Sampling, true: Answer, reported: list[int], *, is_ended: bool = False
    ) -> Answer:
        """The same logits, and other tokens, of which it tells the logits that an honest one has."""
        n = len(true.rows) - len(true.reported) + len(reported)
        sampling = asked(stated, true.key, true.key, ends=is_ended)
        made = await audited(
            self.honest,
            true.rows[:n],
            reported,
            true.fingerprints[: len(reported)].copy(),
            sampling,
            is_ended,
        )
        own = fingerprints_of(made.again)
        assert own is not None
        made.fingerprints[:, OWN] = own[:, OWN]
        if not stated.temperature:  # or it would be impossible at once
            made.fingerprints[:, OWN] = made.fingerprints[:, OWN - 1]
        return made


def show_answers(
    what: str, stated: Sampling, answers: Sequence[Answer], n_vocab: int, honest: Sequence[Answer]
) -> None:
    """`honest`: of the requests in which it does not cheat."""
    pairs = [pair for answer in answers for pair in zip(answer.reported, answer.again, strict=True)]
    ranks = [_rise(*pair) for pair in pairs]
    n_other = sum(reported != again.token for reported, again in pairs)
    n_far = sum(is_far(*pair, stated, n_vocab) for pair in pairs)
    figure = (
        f"{100 * n_other / len(ranks):.1f} % of {len(ranks)} tokens differ, {sum(r > 0 for r in ranks)} are "
        f"likelier, {sum(r < 0 for r in ranks)} less likely, {n_far} far"
    )
    if stated.temperature:
        known = (with_apart(a.again, a.reported, stated, n_vocab) for a in answers)
        apart = max(again.apart or 0.0 for each in known for again in each)
        figure += f", at most {apart:.3f} between two"
    off = [distance(np.stack([s.fingerprint for s in a.again]), a.fingerprints) for a in answers]
    figure += f", logits {min(off):.3f} to {max(off):.3f} apart"
    where = f"last, {described(stated)}"
    announced = ((TOKENS_SAME_KV, "the auditor's type of KV"), (TOKENS_OTHER_KV, "another one, or none"))
    for allowed, claim in announced:
        both = (TokenChecks(each, stated, n_vocab, allowed) for each in (answers, honest))
        row(where, f"{what}, announces {claim}", figure, of_tokens(*both))


def described(stated: Sampling) -> str:
    if not stated.temperature:
        return "greedy"
    return f"temperature {stated.temperature:g}" + (f", top_p {stated.top_p:g}" if stated.top_p < 1 else "")


SHIFTS: Final = (0.5, 0.2, 0.1, 0.05)
"""Nats."""
GREEDY: Final = Sampling(temperature=0.0)
DRAWN: Final = Sampling(temperature=TEMPERATURE)
NUCLEUS: Final = Sampling(temperature=0.8, top_p=0.95)
ASKED: Final = {"greedy": GREEDY, "drawn": DRAWN, "nucleus": NUCLEUS}
HONEST_HEADS: Final[Mapping[str, Mapping[str, Any]]] = {
    "the same settings": {},
    "KV in Q8_0": {"kv_type": "q8_0"},
    "plain attention": PLAIN,
    "ggml's kernels": {"kernels": "ggml"},
}


async def last_stage(bench: Bench, path: Path, folder: Path, layers: LayerRange) -> None:
    tokens, n_vocab = np.concatenate(await bench.tokens()), bench.entry.manifest.n_vocab
    prompts = [tokens[at : at + N_QUESTION] for at in range(0, arguments.answers * 20, 20)]
    honest = Head(bench, folder, layers, None)
    async with honest.pool.running():
        for held in (LayerRange(0, layers.start), layers):
            await honest.pool.load(honest.model, held)
        stage = LastStage(bench, folder, layers, honest, prompts)

        plain: list[Answer] = []

        async def show(what: str, stated: Sampling, **options: Any) -> list[Answer]:
            if not is_wanted(what):
                return []
            answers = await stage.measured(stated, **options)
            show_answers(what, stated, answers, n_vocab, plain or answers)
            return answers

        ending = await show("honest: KV in Q8_0, answers that end", DRAWN, ends=True, kv_type="q8_0")
        end = next(each.token for answer in ending for each in answer.again if each.is_end)
        coarser = {name: bench.quantised(path, name, QUANTISATIONS[name]) for name in ("Q4_0", "Q6_K")}
        tuned = fine_tuned(path, folder / "tuned.gguf", 0.05)
        for stated in (ASKED[each] for each in arguments.asked):
            plain.clear()
            for what, settings in HONEST_HEADS.items():
                answers = await show(f"honest: {what}", stated, **settings)
                plain += answers if not plain else []
            for what, kernels in arguments.kernels:
                with libraries(kernels):
                    await show(f"honest: {what}", stated, kernels="ggml", n_threads=1)
            for what, changed in told_instead(end).items():
                if is_wanted(what):
                    reported = [changed(a.reported) for a in plain]
                    ends = what.startswith("ends")
                    others = [
                        await stage.told_instead(stated, a, each, is_ended=ends)
                        for a, each in zip(plain, reported, strict=True)
                    ]
                    show_answers(what, stated, others, n_vocab, plain)
            for nats in SHIFTS:
                if not is_wanted(what := f"log-probabilities {nats:g} lower"):
                    continue
                shifted = [replace(a, logprobs=lower(a.logprobs, nats)) for a in plain]
                show_answers(what, stated, shifted, n_vocab, plain)
            await show("KV of another prompt", stated, of_other=True)
            for name, made in coarser.items():
                await show(f"{name} instead of Q8_0", stated, path=made)
            await show("weights 5 % off (another fine-tune)", stated, path=tuned)
            if not stated.temperature:
                continue
            await show("the likeliest token", stated, used=GREEDY)
            half = msgspec.structs.replace(stated, temperature=stated.temperature / 2)
            await show("half the temperature", stated, used=half)
            await show("another seed", stated, seed=1000)


def told_instead(end: int) -> Mapping[str, Callable[[list[int]], list[int]]]:
    """Other tokens than those of an answer; `end`: ends a text, where the model goes on."""

    def ended(reported: list[int]) -> list[int]:
        at = next(at for at in range(8, len(reported)) if reported[at] != end)
        return [*reported[:at], end]

    return {
        "another token for each": lambda reported: [token + 1 for token in reported],
        "another token for every tenth": lambda reported: [t + (i % 10 == 9) for i, t in enumerate(reported)],
        "ends after 8 tokens": ended,
    }


def is_wanted(what: str) -> bool:
    needed = ("honest: the same settings", "honest: KV in Q8_0, answers that end")
    return not arguments.only or what in needed or any(part in what for part in arguments.only)


def lower(logprobs: tuple[ReportedLogprobs, ...], nats: float) -> tuple[ReportedLogprobs, ...]:
    return tuple(
        tuple(TokenLogprob(each.token, each.logprob - nats, each.piece) for each in reported)
        for reported in logprobs
    )


def _rise(reported: int, again: Sampled) -> int:
    """Above 0: what was told is likelier than what was sampled again."""
    order = [token for token, _ in again.likeliest]
    return (order.index(again.token) if again.token in order else len(order)) - (
        order.index(reported) if reported in order else len(order)
    )


async def main() -> None:
    path = arguments.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(path, folder)
        n_layers = bench.entry.manifest.n_layers
        print(f"{path.name}; requests until out: median (95 of 100) of {N_PLAYS} strangers\n")
        print(
            "| stage | instead of its work | measured | every request | every tenth |\n|---|---|---|---|---|"
        )
        if "middle" in arguments.stages:
            await middle_stage(bench, path, folder, LayerRange(n_layers // 3, 2 * n_layers // 3))
        if "last" in arguments.stages:
            await last_stage(bench, path, folder, LayerRange(2 * n_layers // 3, n_layers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?", default=GUIDE_PATH)
    parser.add_argument("--seed", type=int, default=7, help="of the requests that are played")
    parser.add_argument("--stages", nargs="+", choices=("middle", "last"), default=("middle", "last"))
    parser.add_argument("--asked", nargs="+", choices=tuple(ASKED), default=tuple(ASKED))
    parser.add_argument("--answers", type=int, default=48, help="that are computed with each setting")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=(), metavar="WORDS", help="of what is done instead")
    parser.add_argument("--kernels", nargs="*", type=named_folder, default=(), metavar="NAME=FOLDER")
    arguments = parser.parse_args()
    trio.run(main)
