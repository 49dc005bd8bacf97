"""Tune a trained projector through the frozen guide: `python -m swarmllm.guide.vision.tune`.

`train` teaches the projector to write the rows of a caption, but the guide does not repeat every caption that
it is shown so. Here the loss is that of the answer's tokens, and its gradient goes through the guide, which
stays as it is, into all weights of the projector.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import Progress

from .. import GUIDE_PATH, PROJECTOR_PATH
from ..template import IM_START
from .captions import caption
from .export import export_projector, read_tower
from .frozen import FrozenGuide, answers_loss, guide_model, guide_tokenizer
from .questions import ask_about
from .scenes import BARS, NUMBER, SHAPES, STRIPS
from .tower import Tower
from .train import picture_batch, rate_share, state_hash

KINDS_TUNED: Final = (NUMBER, STRIPS, SHAPES, BARS, SHAPES, NUMBER, SHAPES, STRIPS, SHAPES, SHAPES)
"""Shapes are what the guide repeats worst."""
LOG_STEPS: Final = 10


@dataclass(frozen=True)
class TuningRecipe:
    """The rate rises over some steps and falls linearly over the last share of them."""

    seed: int = 1
    n_threads: int = 1
    n_steps: int = 100
    n_batch: int = 10
    rate: float = 1e-4
    n_warm_up: int = 8
    fall_share: float = 0.8
    noise: float = 0.05
    """Standard deviation of the noise on all rows, as a share of that of the rows of tokens: processors round
    differently, and the file's matrices are rounded to Q8_0."""


class ProjectorTuning:
    """A projector in tuning. `step` does one step; the recipe decides all of it."""

    def __init__(self, tower: Tower, recipe: TuningRecipe) -> None:
        torch.set_num_threads(recipe.n_threads)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.tower, self.recipe = tower, recipe
        self._tokenizer = guide_tokenizer(GUIDE_PATH)
        self._guide = FrozenGuide(guide_model(GUIDE_PATH))
        embed = self._guide.model.token_embd
        self._guide.begin(embed(torch.tensor(self._tokenizer.encode(f"{IM_START}user\n").ids)))
        self._noise_size = recipe.noise * float(embed.weight.std())
        self._adam = torch.optim.AdamW(
            tower.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._rng = random.Random(recipe.seed)
        self._noise = torch.Generator().manual_seed(recipe.seed)
        self.n_steps_done = 0

    def step(self) -> tuple[float, dict[str, list[bool]]]:
        """Train on one batch; its loss per token of an answer, and for each kind which answers were right."""
        recipe = self.recipe
        scenes, pixels = picture_batch(recipe.n_batch, self._rng, "training", KINDS_TUNED)
        rows = self.tower(pixels)
        rows = rows + self._noise_size * torch.randn(rows.shape, generator=self._noise)
        questions = [ask_about(each, self._rng, heldout=False) for each in scenes]
        answers = [caption(each) for each in scenes]
        loss, right = answers_loss(self._guide, self._tokenizer, rows, questions, answers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
        share = rate_share(self.n_steps_done, recipe.n_steps, recipe.n_warm_up, recipe.fall_share)
        for group in self._adam.param_groups:
            group["lr"] = recipe.rate * share
        self._adam.step()
        self.tower.zero_grad(set_to_none=True)
        self.n_steps_done += 1
        found: dict[str, list[bool]] = {}
        for shown, is_right in zip(scenes, right.tolist(), strict=True):
            found.setdefault(shown.kind, []).append(is_right)
        return loss.item(), found


def run(tower: Tower, recipe: TuningRecipe, log: Path | None) -> dict[str, Any]:
    """Tune `tower` to the end of the recipe; a report."""
    tuning = ProjectorTuning(tower, recipe)
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    right: dict[str, list[bool]] = {}
    with Progress() as progress:
        task = progress.add_task("tuning", total=recipe.n_steps)
        while tuning.n_steps_done < recipe.n_steps:
            loss, found = tuning.step()
            losses.append(loss)
            for kind, each in found.items():
                right.setdefault(kind, []).extend(each)
            progress.advance(task)
            done = tuning.n_steps_done
            if done % LOG_STEPS and done != recipe.n_steps:
                continue
            curve.append((done, round(sum(losses) / len(losses), 4)))
            if log is not None:
                shares = " ".join(f"{kind} {sum(each) / len(each):.3f}" for kind, each in right.items())
                with log.open("a") as file:
                    file.write(f"{done} {curve[-1][1]} {shares} {time.process_time():.0f} s of CPU\n")
            losses.clear()
            right.clear()
    return {"recipe": asdict(recipe), "loss_curve": curve, "weights_sha256": state_hash(tower)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=PROJECTOR_PATH, help="the projector to tune")
    parser.add_argument("--out", type=Path, default=PROJECTOR_PATH, help="the GGUF file")
    parser.add_argument("--steps", type=int, default=TuningRecipe.n_steps)
    parser.add_argument("--seed", type=int, default=TuningRecipe.seed)
    parser.add_argument("--report", type=Path, help="JSON report")
    parser.add_argument("--log", type=Path, help="text file for the loss curve")
    args = parser.parse_args()
    tower = read_tower(args.start)
    report = run(tower, TuningRecipe(seed=args.seed, n_steps=args.steps), args.log)
    export_projector(tower, args.out, name="guide")
    if args.report is not None:
        args.report.write_text(json.dumps({"torch": torch.__version__} | report, indent=1) + "\n")


if __name__ == "__main__":
    main()
