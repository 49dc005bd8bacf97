"""The training itself, where its extra is installed: it learns, it repeats, and libllama agrees with it."""

# ruff: noqa: E402
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import gguf
import llama_cpp
from tokenizers import AddedToken, Tokenizer, models

from swarmllm.guide import data
from swarmllm.guide.data import IGNORED, AnswerMask, batches, sample_texts, train_tokenizer
from swarmllm.guide.export import export_gguf
from swarmllm.guide.model import Llama, Shape
from swarmllm.guide.recipe import Phase, Recipe
from swarmllm.guide.template import ANSWER_PREFIX, SPECIAL_TOKENS, render
from swarmllm.guide.train import Training, weights_hash

pytestmark = pytest.mark.slow

SHAPE = Shape(n_layers=2, n_vocab=600)
RECIPE = Recipe((Phase(3), Phase(3, echo_share=0.2)), n_batch_tokens=512, compiled=False)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "N_SAMPLES_PER_POOL", 200)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(sample_texts(300, seed=1), SHAPE.n_vocab)


def test_a_few_steps_lower_the_loss_and_a_second_run_repeats_them(tokenizer) -> None:
    runs = []
    for _ in range(2):
        training = Training(SHAPE, RECIPE, tokenizer)
        losses = [training.step() for _ in range(RECIPE.n_steps)]
        runs.append((losses, weights_hash(training.model)))
    assert runs[0] == runs[1]
    losses, _ = runs[0]
    assert losses[-1] < losses[0] - 0.5


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tokenizer, tmp_path: Path) -> None:
    whole = Training(SHAPE, RECIPE, tokenizer)
    for step in range(4):
        whole.step()
        if step == 1:
            whole.save(tmp_path / "checkpoint")
    resumed = Training(SHAPE, RECIPE, tokenizer)
    resumed.load(tmp_path / "checkpoint")
    resumed.step()
    resumed.step()
    assert weights_hash(resumed.model) == weights_hash(whole.model)


def test_libllama_computes_the_logits_of_the_trained_weights(tokenizer, tmp_path: Path) -> None:
    training = Training(SHAPE, RECIPE, tokenizer)
    for _ in range(3):
        training.step()
    path = tmp_path / "f32.gguf"
    export_gguf(training.model, tokenizer, path, name="test", quantisation=gguf.GGMLQuantizationType.F32)
    ids = tokenizer.encode(render([{"role": "user", "content": "What is a node?"}])).ids
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=64,
        logits_all=True,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    llama.eval(ids)
    theirs = np.array(llama.scores[: len(ids)])
    llama.close()
    with torch.no_grad():
        ours = training.model(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(theirs, ours, atol=2e-4 * np.abs(ours).max())
    assert np.abs(ours).max() > 0.1


def test_only_answers_are_learned(tokenizer) -> None:
    mask = AnswerMask(tokenizer)
    text = render(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "bye"},
            {"role": "assistant", "content": "Goodbye!"},
        ]
    )
    ids = tokenizer.encode(text).ids
    learned = [target for target in mask.targets(ids) if target != IGNORED]
    assert tokenizer.decode(learned, skip_special_tokens=False) == "Hello!<|im_end|>Goodbye!<|im_end|>"
    for at, target in enumerate(mask.targets(ids)):
        if target != IGNORED:
            assert ids[at + 1] == target


def test_batches_hold_conversations_of_like_length_and_pad_with_nothing_to_learn(tokenizer) -> None:
    stream = batches(tokenizer, 512, seed=1)
    for _ in range(20):
        batch = next(stream)
        assert batch.tokens.shape == batch.targets.shape
        assert batch.n_tokens <= batch.tokens.numel()
        assert (batch.targets != IGNORED).any(dim=1).all()


def test_a_tokenizer_rebuilt_from_the_file_is_the_trained_one(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    export_gguf(Llama(SHAPE), tokenizer, path, name="test")
    reader = gguf.GGUFReader(path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    rebuilt = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    rebuilt.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    rebuilt.pre_tokenizer, rebuilt.decoder = tokenizer.pre_tokenizer, tokenizer.decoder
    for text in (ANSWER_PREFIX, "Ünïcödé 日本 12345 \n\n  def f():\treturn", *sample_texts(20, seed=2)):
        assert rebuilt.encode(text).ids == tokenizer.encode(text).ids
