"""The training of the guide's projector, where its extra is installed: it learns, it repeats, and libmtmd
makes the rows of the tower."""

# ruff: noqa: E402
from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from swarmllm.guide import GUIDE_PATH
from swarmllm.guide.vision.captions import N_CAPTION, N_ENDING, N_ROWS, caption, token_rows
from swarmllm.guide.vision.drawing import as_seen, draw
from swarmllm.guide.vision.export import export_projector, read_tower
from swarmllm.guide.vision.frozen import guide_model, guide_tokenizer
from swarmllm.guide.vision.scenes import KINDS, scene
from swarmllm.guide.vision.tower import Tower, TowerShape
from swarmllm.guide.vision.train import (
    ProjectorRecipe,
    ProjectorTraining,
    TargetRows,
    Words,
    state_hash,
    train_words,
)
from swarmllm.guide.vision.tune import ProjectorTuning, TuningRecipe
from swarmllm_workers.vision.projector import Projector

pytestmark = pytest.mark.slow

SHAPE = TowerShape(width=32, n_layers=2, n_heads=2, n_ff=64)
RECIPE = ProjectorRecipe(n_steps=6, n_batch=8, n_late_steps=2, n_warm_up=1, n_word_steps=2, n_word_batch=4)


@pytest.fixture(scope="module")
def targets() -> TargetRows:
    embeddings = guide_model(GUIDE_PATH).token_embd.weight
    words = Words(torch.zeros(N_ENDING, 256), torch.zeros_like(embeddings))
    return TargetRows(guide_tokenizer(GUIDE_PATH), embeddings, words)


def test_a_few_steps_lower_the_loss_and_a_second_run_repeats_them(targets: TargetRows) -> None:
    runs = []
    for _ in range(2):
        training = ProjectorTraining(SHAPE, RECIPE, targets)
        losses = [training.step()[0] for _ in range(RECIPE.n_steps)]
        runs.append((losses, state_hash(training.tower)))
    assert runs[0] == runs[1]
    losses, _ = runs[0]
    assert losses[-1] < losses[0] - 0.2


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    targets: TargetRows, tmp_path: Path
) -> None:
    whole = ProjectorTraining(SHAPE, RECIPE, targets)
    for step in range(5):
        whole.step()
        if step == 3:
            whole.save(tmp_path / "checkpoint")
    resumed = ProjectorTraining(SHAPE, RECIPE, targets)
    resumed.load(tmp_path / "checkpoint")
    resumed.step()
    assert state_hash(resumed.tower) == state_hash(whole.tower)


def test_a_projector_that_was_trained_before_takes_the_late_steps_only(targets: TargetRows) -> None:
    before = ProjectorTraining(SHAPE, RECIPE, targets)
    before.step()
    training = ProjectorTraining(SHAPE, RECIPE, targets)
    training.start_late(before.tower)
    assert state_hash(training.tower) == state_hash(before.tower)
    n_steps = 0
    while training.n_steps_done < RECIPE.n_steps:
        training.step()
        n_steps += 1
    assert n_steps == RECIPE.n_late_steps
    assert state_hash(training.tower) != state_hash(before.tower)


def test_the_words_are_learned_alike_twice() -> None:
    tokenizer = guide_tokenizer(GUIDE_PATH)
    first, second = (train_words(RECIPE, tokenizer) for _ in range(2))
    assert torch.equal(first.ending, second.ending)
    assert torch.equal(first.changes, second.changes)
    assert first.changes.any()


def test_tuning_through_the_guide_lowers_the_loss_and_repeats() -> None:
    recipe = TuningRecipe(n_steps=4, n_batch=3, rate=0.01, n_warm_up=1, noise=0.0)
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        tuning = ProjectorTuning(Tower(SHAPE), recipe)
        runs.append(([tuning.step()[0] for _ in range(recipe.n_steps)], state_hash(tuning.tower)))
    assert runs[0] == runs[1]
    losses, _ = runs[0]
    assert losses[-1] < losses[0]


def test_a_file_is_read_as_the_tower_that_it_is_of(tmp_path: Path) -> None:
    tower = Tower(SHAPE)
    for number in range(2):
        export_projector(tower, tmp_path / f"{number}.gguf", name="test")
        read = read_tower(tmp_path / f"{number}.gguf", SHAPE)
        if number:
            assert state_hash(read) == state_hash(tower), "rounded once, it stays"
        tower = read


def test_libmtmd_makes_the_rows_of_the_tower(tmp_path: Path) -> None:
    """But for the rounding of Q8_0 and f16."""
    torch.manual_seed(1)
    tower = Tower(SHAPE)
    path = tmp_path / "mmproj.gguf"
    export_projector(tower, path, name="test")
    projector = Projector(GUIDE_PATH, path, 1)
    rng = random.Random(3)
    for kind in KINDS:
        image = draw(scene(kind, rng, "training"), rng)
        (part,) = projector.encode(np.asarray(image))
        with torch.no_grad():
            ours = tower(torch.from_numpy(as_seen(image).copy())[None])[0].numpy()
        assert part.rows is not None
        assert part.rows.shape == ours.shape == (N_ROWS, 256)
        assert np.abs(part.rows - ours).max() < 0.05 * np.abs(ours).max()


def test_every_caption_fits_its_rows() -> None:
    tokenizer, rng = guide_tokenizer(GUIDE_PATH), random.Random(4)
    for kind in KINDS:
        for _ in range(200):
            text = caption(scene(kind, rng, "training"))
            rows = token_rows(tokenizer, text)
            assert len(rows) == N_ROWS - N_ENDING
            assert tokenizer.decode(rows[-N_CAPTION:]).strip() == text
    with pytest.raises(ValueError, match="tokens"):
        token_rows(tokenizer, "word " * 20)
