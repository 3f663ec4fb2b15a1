"""sentence-transformers: text vectors from families that read a text both ways, and training."""

import pytest
import torch

from tests.clients.checkpoints import ENGINES, READERS, TEXTS, build, met, save, tokenizer

sentence_transformers = pytest.importorskip("sentence_transformers")


def embedder(folder, mode="mean"):
    from sentence_transformers.models import Pooling, Transformer

    transformer = Transformer(folder)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=mode)
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu")


@pytest.mark.parametrize("name", met(READERS))
def test_encode(name, tmp_path):
    """The mean over a text's tokens, whatever it shares a batch with; and again from its own folder."""
    model = build(name, "Model")
    encoder = embedder(save(model, "Model", tmp_path / "model"))
    found = encoder.encode(TEXTS, batch_size=4, convert_to_tensor=True)
    for text, vector in zip(TEXTS, found):
        with torch.no_grad():
            states = model(tokenizer()(text, return_tensors="pt").input_ids).last_hidden_state[0]
        torch.testing.assert_close(vector, states.mean(0), atol=1e-4, rtol=1e-4)
    if name not in ENGINES:
        return
    encoder.save_pretrained(str(tmp_path / "saved"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert type(again[0].auto_model) is type(model)
    torch.testing.assert_close(again.encode(TEXTS, convert_to_tensor=True), found)


def test_training(tmp_path):
    """Two steps that pull pairs of texts together."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    encoder = embedder(save(build("xf_longformer", "Model"), "Model", tmp_path / "model"))
    pairs = Dataset.from_dict({"anchor": TEXTS, "positive": [text.split(" ", 1)[1] for text in TEXTS]})
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    trainer = SentenceTransformerTrainer(
        model=encoder,
        args=SentenceTransformerTrainingArguments(
            str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True
        ),
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(encoder),
    )
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    assert all(value.isfinite().all() for value in encoder.state_dict().values() if value.is_floating_point())
