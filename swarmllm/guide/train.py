"""Train the guide and its draft: `python -m swarmllm.guide.train`.

Runs on a CPU, from a seed. With the same seed, number of threads, kind of CPU and version of PyTorch the
run gives the same file; another number of threads changes the order of sums and with it the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import DRAFT_PATH, GUIDE_PATH
from .data import IGNORED, Batch, batches, sample_texts, train_tokenizer
from .export import export_gguf
from .model import DRAFT_SHAPE, GUIDE_SHAPE, Llama, Shape
from .recipe import DRAFT_PHASES, GUIDE_PHASES, Recipe

N_TOKENIZER_SAMPLES = 12000
TOKENIZER_SEED = 7


def orthogonalise(matrices: Tensor, n_steps: int = 5) -> Tensor:
    """Replace the singular values of each [rows, columns] matrix of the batch by roughly 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    for _ in range(n_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Nesterov momentum with orthogonal updates; `step` takes the learning rate of the moment.

    After Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/): five Newton-Schulz steps with the
    quintic coefficients given there. Matrices of one shape go through the steps together. On this corpus it
    needs far fewer tokens than AdamW alone, which still trains the embedding, the head and the norms.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        momentum: float = 0.95,
        decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype`: of the Newton-Schulz steps. A CPU without bfloat16 takes ten times as long with it."""
        self.dtype = dtype
        self.momentum = momentum
        self.decay = decay
        self.groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in weights:
            self.groups[tuple(weight.shape)].append(weight)
        self.velocity = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    def step(self, rate: float) -> None:
        with torch.no_grad():
            self._step(rate)

    def _step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradient = torch.stack([weight.grad for weight in group if weight.grad is not None])
            velocity = self.velocity[shape]
            velocity.mul_(self.momentum).add_(gradient)
            update = orthogonalise(gradient.add(velocity, alpha=self.momentum).to(self.dtype)).float()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - rate * self.decay).sub_(change, alpha=rate * scale)


def weights_hash(model: Llama) -> str:
    """SHA-256 over all weights, in hex."""
    hasher = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        hasher.update(name.encode())
        hasher.update(weight.float().numpy().tobytes())
    return hasher.hexdigest()


def answer_loss(model: Llama, batch: Batch) -> Tensor:
    """Mean cross-entropy over the tokens of the answers; logits are made for those only."""
    learned = batch.targets != IGNORED
    logits = model.output(model.hidden(batch.tokens)[learned])
    return cross_entropy(logits.float(), batch.targets[learned])


class Training:
    """A model in training. `step` does one step; the recipe decides all of it."""

    def __init__(self, shape: Shape, recipe: Recipe, tokenizer: Tokenizer) -> None:
        torch.set_num_threads(recipe.n_threads)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = Llama(shape)
        if recipe.compiled:
            for layer in self.model.blk:
                layer.compile(dynamic=True)
        named = [(name, weight) for name, weight in self.model.named_parameters()]
        matrices = [(name, weight) for name, weight in named if name.startswith("blk.") and weight.ndim == 2]
        is_query_key = re.compile(r"attn_[qk]\.weight$").search
        self.muon = Muon(weight for name, weight in matrices if not is_query_key(name))
        self.muon_queries_keys = Muon(weight for name, weight in matrices if is_query_key(name))
        chosen = {name for name, _ in matrices}
        others = [weight for name, weight in named if name not in chosen]
        self.adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.batches = self._phased_batches(tokenizer)
        self.n_steps_done = 0
        self.n_tokens_done = 0

    def _phased_batches(self, tokenizer: Tokenizer) -> Iterator[Batch]:
        recipe = self.recipe
        for number, phase in enumerate(recipe.phases):
            seed = recipe.seed + number
            stream = batches(tokenizer, recipe.n_batch_tokens, seed, phase.echo_share, phase.mix)
            yield from islice(stream, phase.n_steps)

    def save(self, path: Path) -> None:
        """Write everything that `load` needs, in one atomic step."""
        state = {
            "model": self.model.state_dict(),
            "velocities": [self.muon.velocity, self.muon_queries_keys.velocity],
            "adam": self.adam.state_dict(),
            "n_steps": self.n_steps_done,
            "n_tokens": self.n_tokens_done,
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on where `save` was called; the batches up to there are made again and skipped."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.muon.velocity, self.muon_queries_keys.velocity = state["velocities"]
        self.adam.load_state_dict(state["adam"])
        self.n_steps_done, self.n_tokens_done = state["n_steps"], state["n_tokens"]
        for _ in range(self.n_steps_done):
            next(self.batches)

    def step(self) -> float:
        """Train on one batch and return its loss in nats per answer token."""
        batch = next(self.batches)
        phase, step = self.recipe.at(self.n_steps_done)
        share = phase.rate_share(step)
        with torch.autocast("cpu", torch.bfloat16) if self.recipe.bf16 else nullcontext():
            loss = answer_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.recipe.muon_rate * share
        self.muon.step(rate)
        self.muon_queries_keys.step(rate * phase.query_key_share)
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.adam_rate * share
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.n_steps_done += 1
        self.n_tokens_done += batch.n_tokens
        return float(loss.detach())


def run(
    shape: Shape, recipe: Recipe, tokenizer: Tokenizer, label: str, checkpoint: Path | None, log: Path | None
) -> tuple[Llama, dict[str, Any]]:
    """Train to the end of the recipe; return the model and a report."""
    training = Training(shape, recipe, tokenizer)
    if checkpoint is not None and checkpoint.exists():
        training.load(checkpoint)
    n_tokens_before = training.n_tokens_done
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    started_s = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task(
            label, total=recipe.n_steps, completed=training.n_steps_done, loss=math.nan, speed=0.0
        )
        while training.n_steps_done < recipe.n_steps:
            recent.append(training.step())
            speed = (training.n_tokens_done - n_tokens_before) / (time.monotonic() - started_s)
            progress.update(task, advance=1, loss=recent[-1], speed=speed)
            if training.n_steps_done % 50 == 0 or training.n_steps_done == recipe.n_steps:
                curve.append((training.n_steps_done, sum(recent) / len(recent)))
                recent.clear()
                if log is not None:
                    with log.open("a") as file:
                        elapsed_s = time.monotonic() - started_s
                        step, loss = curve[-1]
                        file.write(f"{label} {step} {loss:.4f} {speed:.0f} tokens/s {elapsed_s:.0f} s\n")
                if checkpoint is not None and training.n_steps_done % 100 == 0:
                    training.save(checkpoint)
    report = {
        "shape": asdict(shape),
        "recipe": asdict(recipe),
        "n_parameters": sum(weight.numel() for weight in training.model.parameters()),
        "n_tokens": training.n_tokens_done,
        "seconds": round(time.monotonic() - started_s, 1),
        "loss_curve": [(step, round(loss, 4)) for step, loss in curve],
        "weights_sha256": weights_hash(training.model),
    }
    return training.model, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("guide", "draft"), help="train one of the two models")
    parser.add_argument("--phases", type=int, help="stop after this many phases of the recipe")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--f32", action="store_true", help="no bfloat16, for CPUs without it")
    parser.add_argument("--eager", action="store_true", help="no torch.compile (it needs a C++ compiler)")
    parser.add_argument("--out", type=Path, default=GUIDE_PATH.parent, help="folder of the GGUF files")
    parser.add_argument("--report", type=Path, help="JSON report")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to, and to go on from")
    parser.add_argument("--log", type=Path, help="text file for the loss curve")
    args = parser.parse_args()

    for folder in (args.out, args.checkpoints, *(path and path.parent for path in (args.report, args.log))):
        if folder is not None:
            # Now rather than after an hour, when the first thing is to be written there.
            folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(sample_texts(N_TOKENIZER_SAMPLES, TOKENIZER_SEED), GUIDE_SHAPE.n_vocab)
    reports: dict[str, Any] = {"torch": torch.__version__}
    jobs = (
        ("guide", GUIDE_SHAPE, GUIDE_PHASES, GUIDE_PATH.name),
        ("draft", DRAFT_SHAPE, DRAFT_PHASES, DRAFT_PATH.name),
    )
    for label, shape, phases, file_name in jobs:
        if args.only not in (None, label):
            continue
        recipe = Recipe(
            phases[: args.phases],
            seed=args.seed,
            n_threads=args.threads,
            bf16=not args.f32,
            compiled=not args.eager,
        )
        checkpoint = args.checkpoints / f"{label}.pt" if args.checkpoints is not None else None
        model, reports[label] = run(shape, recipe, tokenizer, label, checkpoint, args.log)
        export_gguf(model, tokenizer, args.out / file_name, name=Path(file_name).stem)
    if args.report is not None:
        args.report.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
