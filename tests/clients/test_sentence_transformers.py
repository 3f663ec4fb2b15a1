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


@pytest.mark.parametrize("sparse", [False, True])
def test_features_given_again(sparse, tmp_path):
    """A module writes what it has made into the features, which losses of two models and loops of one's own give
    again."""
    folder = save(build("xf_bert", "Model"), "Model", tmp_path)
    encoder = sentence_transformers.SparseEncoder(folder, device="cpu") if sparse else embedder(folder)
    if sparse:
        encoder[2].k = encoder[2].k_aux = 4
    features = encoder.preprocess(TEXTS)
    first = encoder(features)["sentence_embedding"]
    assert {"token_embeddings", "sentence_embedding"} <= features.keys()
    torch.testing.assert_close(encoder(features)["sentence_embedding"], first)


@pytest.mark.parametrize("tied", [True, False])
def test_denoising(tied, tmp_path):
    """TSDAE: a decoder of the same family reads nothing of the damaged text but its vector."""
    from sentence_transformers.losses import DenoisingAutoEncoderLoss

    folder = save(build("xf_bert", "Model"), "Model", tmp_path)
    encoder = embedder(folder)
    loss = DenoisingAutoEncoderLoss(encoder, folder, tie_encoder_decoder=tied)
    with torch.no_grad():
        for name, parameter in loss.decoder.named_parameters():
            if "cross_attention" in name:
                parameter.normal_(std=0.5)
    if tied:
        assert loss.decoder.get_input_embeddings().weight is encoder[0].auto_model.get_input_embeddings().weight
    whole = encoder.preprocess(TEXTS)
    damaged, other = encoder.preprocess(["cat", "dog", "rain", "bird"]), encoder.preprocess(["mat"] * 4)
    value = loss([damaged, whole], None)
    assert (loss([other, whole], None) - value).abs() > 1e-3
    value.backward()
    assert all(parameter.grad is not None for name, parameter in encoder.named_parameters() if "pooler" not in name)


def test_where_flattened_positions_begin(tmp_path):
    """With variable-length kernels sentence-transformers gives positions from 0, or from where it finds that a model
    counts them."""
    for name, fields, first in (("xf_roberta", {"first_position": 2}, 2), ("xf_roberta", {}, 0), ("xf_bert", {}, 0)):
        encoder = embedder(save(build(name, "Model", **fields), "Model", tmp_path / f"{name}{first}"))
        assert encoder[0]._infer_flatten_position_offset() == first


@pytest.mark.parametrize("name", ["xf_bert", "xf_roformer"])
def test_query_expansion(name, tmp_path):
    """ColBERT's mask tokens behind a query, which no token reads, stand at places of their own there."""
    model, words = build(name, "Model"), tokenizer()
    ids = words(TEXTS[:1], return_tensors="pt").input_ids
    count, more = ids.shape[1], 4
    ids = torch.nn.functional.pad(ids, (0, more), value=words.mask_token_id)
    mask = (torch.arange(count + more) < count).long()[None]
    with torch.no_grad():
        found = model(ids, mask).last_hidden_state
        expected = model(ids, mask, position_ids=torch.arange(count + more)[None]).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert (found[0, -1] - found[0, -2]).abs().max() > 1e-3
