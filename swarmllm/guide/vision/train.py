"""Train the projector of the guide: `python -m swarmllm.guide.vision.train`.

First the words are learned, the rows that make the guide repeat a caption; then the projector learns to write
captions of pictures in such rows. The guide itself stays as it is: all of this is trained towards the weights
in its file. Runs on a CPU, from a seed, as `swarmllm.guide.train` does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import GUIDE_PATH, PROJECTOR_PATH
from ..train import Muon
from .captions import N_CAPTION, N_ENDING, N_ROWS, caption, token_rows
from .drawing import as_seen, draw
from .export import export_projector, read_tower
from .frozen import FrozenGuide, guide_model, guide_tokenizer
from .scenes import BARS, KINDS, SHAPES, Scene, Split, scene, with_another_colour
from .tower import Tower, TowerShape
from .words import PictureWords

LEAST_RATE_SHARE: Final = 0.02
SHARPNESS: Final = 2.0
"""By how much a row's squared distance from a token's counts."""
LOG_STEPS: Final = 25
SAVE_STEPS: Final = 50
LATE_KINDS: Final = (*KINDS, SHAPES, BARS, SHAPES, BARS)
WORD_WARM_UP: Final = 10


@dataclass(frozen=True)
class ProjectorRecipe:
    """The rate of each part rises over some steps and falls linearly over the last share of them."""

    seed: int = 1
    n_threads: int = 1
    n_word_steps: int = 200
    n_word_batch: int = 8
    ending_rate: float = 0.02
    change_rate: float = 0.005
    n_steps: int = 1200
    n_late_steps: int = 700
    """The last of these steps draw more of the kinds that are hard, and weigh distances more."""
    n_batch: int = 24
    muon_rate: float = 0.01
    adam_rate: float = 0.002
    n_warm_up: int = 50
    fall_share: float = 0.6
    distance_weight: float = 0.04
    more_colours_share: float = 0.4
    """Of pictures of shapes."""
    late_distance_weight: float = 0.2
    """Of the mean squared distance of all rows from what they should be, beside the captions' loss."""


def rate_share(step: int, n_steps: int, n_warm_up: int, fall_share: float) -> float:
    """Share of the full learning rate."""
    falling = (n_steps - step) / max(1.0, fall_share * n_steps)
    return min(1.0, (step + 1) / n_warm_up) * max(LEAST_RATE_SHARE, min(1.0, falling))


def state_hash(module: nn.Module) -> str:
    """SHA-256 over all weights, in hex."""
    hasher = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        hasher.update(name.encode())
        hasher.update(weight.float().numpy().tobytes())
    return hasher.hexdigest()


def make_deterministic(recipe: ProjectorRecipe) -> None:
    torch.set_num_threads(recipe.n_threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(recipe.seed)


@dataclass(frozen=True)
class Words:
    """`ending`: f32 [N_ENDING, n_embd], `changes`: f32 [n_vocab, n_embd]."""

    ending: Tensor
    changes: Tensor


def train_words(recipe: ProjectorRecipe, tokenizer: Tokenizer, log: Path | None = None) -> Words:
    make_deterministic(recipe)
    words = PictureWords(FrozenGuide(guide_model(GUIDE_PATH)), tokenizer)
    rates = {words.ending: recipe.ending_rate, words.changes: recipe.change_rate}
    adam = torch.optim.AdamW(
        [{"params": [each]} for each in rates], lr=recipe.ending_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    rng = random.Random(recipe.seed)
    for step in range(recipe.n_word_steps):
        loss, right = words.loss(words.batch(recipe.n_word_batch, rng), rng)
        loss.backward()
        share = rate_share(step, recipe.n_word_steps, WORD_WARM_UP, recipe.fall_share)
        for group, rate in zip(adam.param_groups, rates.values(), strict=True):
            group["lr"] = rate * share
        adam.step()
        adam.zero_grad()
        if log is not None and step % 10 == 9:
            _write(log, f"words {step + 1} {loss.item():.4f} right {right.float().mean():.2f}")
    return Words(words.ending.detach().clone(), words.changes.detach().clone())


class TargetRows:
    """What a picture's rows should be, and the tokens that stand in captions."""

    def __init__(self, tokenizer: Tokenizer, embeddings: Tensor, words: Words) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        rng = random.Random(0)
        found: set[int] = set()
        for kind in KINDS:
            for _ in range(3000):
                shown = scene(kind, rng, "training")
                found.update(self._rows(shown) + self._rows(with_another_colour(shown, rng)))
        self.tokens = sorted(found)
        self.raw = embeddings[self.tokens]
        """f32 [number of different tokens, n_embd]"""
        self.changed = self.raw + words.changes[self.tokens]
        self.ending = words.ending
        self._number = {token: number for number, token in enumerate(self.tokens)}

    def _rows(self, shown: Scene) -> list[int]:
        text = caption(shown)
        if text not in self._known:
            self._known[text] = token_rows(self._tokenizer, text)
        return self._known[text]

    def numbers(self, scenes: list[Scene]) -> Tensor:
        """int64 [batch, N_ROWS - N_ENDING], numbers of tokens."""
        return torch.tensor([[self._number[token] for token in self._rows(each)] for each in scenes])


def picture_batch(
    n: int,
    rng: random.Random,
    split: Split,
    kinds: Sequence[str] = KINDS,
    more_colours_share: float = 0.0,
) -> tuple[list[Scene], Tensor]:
    """Scenes of all kinds in turn, and their pictures, u8 [n, SIDE, SIDE, 3]."""
    scenes = [scene(kinds[number % len(kinds)], rng, split) for number in range(n)]
    if more_colours_share:
        scenes = [
            with_another_colour(each, rng) if rng.random() < more_colours_share else each for each in scenes
        ]
    return scenes, torch.from_numpy(np.stack([as_seen(draw(each, rng)) for each in scenes]))


class ProjectorTraining:
    """A projector in training. `step` does one step; the recipe decides all of it."""

    def __init__(self, shape: TowerShape, recipe: ProjectorRecipe, targets: TargetRows) -> None:
        make_deterministic(recipe)
        self.recipe, self.targets = recipe, targets
        self.tower = Tower(shape)
        named = list(self.tower.named_parameters())
        matrices = [weight for name, weight in named if name.startswith("blk.") and weight.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        self.muon = Muon(matrices, dtype=torch.float32)
        others = [weight for _, weight in named if id(weight) not in chosen]
        self.adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.rng = random.Random(recipe.seed)
        self.n_steps_done = 0

    def save(self, path: Path) -> None:
        """Write everything that `load` needs, in one atomic step."""
        state = {
            "tower": self.tower.state_dict(),
            "velocity": self.muon.velocity,
            "adam": self.adam.state_dict(),
            "n_steps": self.n_steps_done,
            "rng": self.rng.getstate(),
        }
        part = path.with_name(path.name + ".part")
        torch.save(state, part)
        part.replace(path)

    def start_late(self, tower: Tower) -> None:
        """Begin with the late steps, and with the weights of a projector that was trained before."""
        self.tower.load_state_dict(tower.state_dict())
        self.n_steps_done = self.recipe.n_steps - self.recipe.n_late_steps

    def load(self, path: Path) -> None:
        """Go on where `save` was called."""
        state = torch.load(path)
        self.tower.load_state_dict(state["tower"])
        self.muon.velocity = state["velocity"]
        self.adam.load_state_dict(state["adam"])
        self.n_steps_done = state["n_steps"]
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))

    def scores(self, rows: Tensor) -> Tensor:
        """How much each row [..., n_embd] is each of the tokens: minus its squared distance, scaled."""
        tokens = self.targets.changed
        distance = rows.square().sum(-1, keepdim=True) - 2 * rows @ tokens.T + tokens.square().sum(-1)
        return -SHARPNESS * distance

    def step(self) -> tuple[float, list[float]]:
        """Train on one batch; its loss per row of a caption, and that of each kind."""
        recipe = self.recipe
        is_late = self.n_steps_done >= recipe.n_steps - recipe.n_late_steps
        kinds = LATE_KINDS if is_late else KINDS
        scenes, pixels = picture_batch(recipe.n_batch, self.rng, "training", kinds, recipe.more_colours_share)
        numbers = self.targets.numbers(scenes)
        rows = self.tower(pixels)
        first = N_ROWS - N_ENDING - N_CAPTION
        scores = self.scores(rows[:, first : first + N_CAPTION])
        wanted = numbers[:, first:]
        losses = cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
        targets = self.targets
        due = targets.raw[numbers[:, :first]], targets.changed[numbers[:, first:]]
        whole = torch.cat((*due, targets.ending.expand(len(scenes), -1, -1)), 1)
        distance = (rows - whole).square().sum(-1).mean()
        weight = recipe.late_distance_weight if is_late else recipe.distance_weight
        (losses.mean() + weight * distance).backward()
        torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
        share = rate_share(self.n_steps_done, recipe.n_steps, recipe.n_warm_up, recipe.fall_share)
        self.muon.step(recipe.muon_rate * share)
        for group in self.adam.param_groups:
            group["lr"] = recipe.adam_rate * share
        self.adam.step()
        self.tower.zero_grad(set_to_none=True)
        self.n_steps_done += 1
        each_kind = [losses[[each.kind == kind for each in scenes]].mean().item() for kind in KINDS]
        return losses.mean().item(), each_kind

    def right(self, scenes: list[Scene], pixels: Tensor) -> dict[str, float]:
        """For each kind the share of captions all of whose rows are nearest to the right tokens."""
        first = N_ROWS - N_ENDING - N_CAPTION
        with torch.no_grad():
            found = self.scores(self.tower(pixels)[:, first : first + N_CAPTION]).argmax(-1)
        whole = (found == self.targets.numbers(scenes)[:, first:]).all(1).float()
        return {kind: whole[at :: len(KINDS)].mean().item() for at, kind in enumerate(KINDS)}


def _write(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(line + "\n")


def run(
    shape: TowerShape,
    recipe: ProjectorRecipe,
    targets: TargetRows,
    checkpoint: Path | None,
    log: Path | None,
    start: Tower | None = None,
) -> tuple[Tower, dict[str, Any]]:
    """Train to the end of the recipe; the projector and a report. `start`: one that was trained before, which
    takes the late steps only."""
    training = ProjectorTraining(shape, recipe, targets)
    if checkpoint is not None and checkpoint.exists():
        training.load(checkpoint)
    elif start is not None:
        training.start_late(start)
    shown = picture_batch(256, random.Random(recipe.seed + 1), "validation")
    started_s, curve, recent = time.monotonic(), [], []
    with Progress() as progress:
        task = progress.add_task("projector", total=recipe.n_steps, completed=training.n_steps_done)
        while training.n_steps_done < recipe.n_steps:
            recent.append(training.step())
            progress.advance(task)
            done = training.n_steps_done
            if done % LOG_STEPS and done != recipe.n_steps:
                continue
            kinds = [sum(each) / len(recent) for each in zip(*(kinds for _, kinds in recent), strict=True)]
            curve.append((done, round(sum(loss for loss, _ in recent) / len(recent), 4)))
            recent.clear()
            line = f"{done} {curve[-1][1]} kinds {' '.join(f'{each:.3f}' for each in kinds)}"
            if done % SAVE_STEPS == 0 or done == recipe.n_steps:
                right = training.right(*shown)
                line += f" right {' '.join(f'{kind} {share:.3f}' for kind, share in right.items())}"
                if checkpoint is not None:
                    training.save(checkpoint)
            if log is not None:
                _write(
                    log, f"{line} {time.monotonic() - started_s:.0f} s, {time.process_time():.0f} s of CPU"
                )
    report = {
        "shape": asdict(shape),
        "recipe": asdict(recipe),
        "n_parameters": sum(weight.numel() for weight in training.tower.parameters()),
        "loss_curve": curve,
        "validation_captions": training.right(*shown),
        "weights_sha256": state_hash(training.tower),
    }
    return training.tower, report


def learned_words(
    recipe: ProjectorRecipe, tokenizer: Tokenizer, folder: Path | None, log: Path | None
) -> Words:
    """Trained, or from an earlier run in the folder."""
    kept = folder / "words.pt" if folder is not None else None
    if kept is not None and kept.exists():
        return Words(*torch.load(kept))
    words = train_words(recipe, tokenizer, log)
    if kept is not None:
        torch.save((words.ending, words.changes), kept)
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=ProjectorRecipe.n_steps)
    parser.add_argument("--start", type=Path, help="a projector that takes the late steps only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=PROJECTOR_PATH, help="the GGUF file")
    parser.add_argument("--report", type=Path, help="JSON report")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to, and to go on from")
    parser.add_argument("--log", type=Path, help="text file for the loss curve")
    args = parser.parse_args()
    for folder in (
        args.out.parent,
        args.checkpoints,
        *(each and each.parent for each in (args.report, args.log)),
    ):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    recipe = ProjectorRecipe(seed=args.seed, n_threads=args.threads, n_steps=args.steps)
    tokenizer = guide_tokenizer(GUIDE_PATH)
    words = learned_words(recipe, tokenizer, args.checkpoints, args.log)
    targets = TargetRows(tokenizer, guide_model(GUIDE_PATH).token_embd.weight, words)
    checkpoint = args.checkpoints / "projector.pt" if args.checkpoints is not None else None
    start = read_tower(args.start) if args.start is not None else None
    tower, report = run(TowerShape(), recipe, targets, checkpoint, args.log, start)
    export_projector(tower, args.out, name="guide")
    if args.report is not None:
        args.report.write_text(json.dumps({"torch": torch.__version__} | report, indent=1) + "\n")


if __name__ == "__main__":
    main()
