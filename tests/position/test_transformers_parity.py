"""The same numbers as transformers' RoFormer and DeBERTa, versions 1 and 2, with the same weights."""

import pytest
import torch
import transformers

from hf_xformers import XFormerConfig, XFormerModel
from tests.helpers import close, pad, tokens

SIZES = dict(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
POST_LN = {"embedding": {"type": "token", "normalize": True}, "layer_norm_eps": 1e-7}
LENGTH = 11


def copy_linear(ours, theirs, rows=slice(None)):
    ours.weight.copy_(theirs.weight[rows])
    if ours.bias is not None:
        ours.bias.copy_(torch.zeros_like(ours.bias) if theirs.bias is None else theirs.bias[rows])


def copy_norm(ours, theirs):
    ours.load_state_dict(theirs.state_dict())


@torch.no_grad()
def copy_layer(ours, theirs):
    """All but the projections of queries, keys and values: the same names in all three models."""
    copy_linear(ours.attention.o_proj, theirs.attention.output.dense)
    copy_norm(ours.attention_residual.norm, theirs.attention.output.LayerNorm)
    copy_linear(ours.feedforward.up_proj, theirs.intermediate.dense)
    copy_linear(ours.feedforward.down_proj, theirs.output.dense)
    copy_norm(ours.feedforward_residual.norm, theirs.output.LayerNorm)


@torch.no_grad()
def copy_projections(ours, attention, names):
    for name, theirs in zip(("q_proj", "k_proj", "v_proj"), names, strict=True):
        copy_linear(getattr(ours.attention, name), getattr(attention, theirs))


@torch.no_grad()
def random_weights(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.double().eval()


def compare(ours, theirs, tolerance=1e-9):
    ids, mask = pad([tokens(LENGTH, high=60), tokens(6, seed=1, high=60)], LENGTH, "right")
    with torch.no_grad():
        for given in (None, mask):
            one = ours(input_ids=ids, attention_mask=given).last_hidden_state
            other = theirs(input_ids=ids, attention_mask=given).last_hidden_state
            real = torch.ones_like(mask).bool() if given is None else mask.bool()
            close(one[real], other[real], tolerance)


@torch.no_grad()
def test_roformer():
    config = transformers.RoFormerConfig(**SIZES, embedding_size=16, max_position_embeddings=32, type_vocab_size=1)
    theirs = random_weights(transformers.RoFormerModel(config))
    theirs.encoder.embed_positions.weight.copy_(theirs.encoder.embed_positions.create_weight())
    fields = {**POST_LN, "layer_norm_eps": config.layer_norm_eps, "type_vocab_size": 1}
    position = {"type": "rotary", "layout": "interleaved"}
    ours = XFormerModel(XFormerConfig(**SIZES, **fields, position=position)).double().eval()
    ours.trunk.embedding.tokens.weight.copy_(theirs.embeddings.word_embeddings.weight)
    ours.trunk.embedding.types.weight.copy_(theirs.embeddings.token_type_embeddings.weight)
    copy_norm(ours.trunk.embedding.norm, theirs.embeddings.LayerNorm)
    for one, other in zip(ours.trunk.layers, theirs.encoder.layer, strict=True):
        copy_layer(one, other)
        copy_projections(one, other.attention.self, ("query", "key", "value"))
    compare(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
@pytest.mark.parametrize("reach", [5, 32])
def test_deberta_first_version(terms, reach):
    config = transformers.DebertaConfig(
        **SIZES,
        max_position_embeddings=32,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=terms,
        max_relative_positions=reach,
        position_biased_input=False,
    )
    theirs = random_weights(transformers.DebertaModel(config))
    position = {"type": "deberta", "terms": terms, "max_distance": reach}
    ours = XFormerModel(XFormerConfig(**SIZES, **POST_LN, position=position)).double().eval()
    ours.trunk.embedding.tokens.weight.copy_(theirs.embeddings.word_embeddings.weight)
    copy_norm(ours.trunk.embedding.norm, theirs.embeddings.LayerNorm)
    ours.trunk.position.table.weight.copy_(theirs.encoder.rel_embeddings.weight)
    heads, width = 4, 4
    for one, other in zip(ours.trunk.layers, theirs.encoder.layer, strict=True):
        copy_layer(one, other)
        own = other.attention.self
        # One projection holds q, k and v of each head in turn; only queries and values have biases.
        packed = own.in_proj.weight.view(heads, 3, width, -1)
        for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
            getattr(one.attention, name).weight.copy_(packed[:, number].reshape(heads * width, -1))
        one.attention.q_proj.bias.copy_(own.q_bias)
        one.attention.k_proj.bias.zero_()
        one.attention.v_proj.bias.copy_(own.v_bias)
        if "c2p" in terms:
            copy_linear(one.attention.position_terms.key_proj, own.pos_proj)
        if "p2c" in terms:
            copy_linear(one.attention.position_terms.query_proj, own.pos_q_proj)
    compare(ours, theirs, 1e-5)  # their layer norm computes in float32 whatever the model's dtype


@torch.no_grad()
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"]])
@pytest.mark.parametrize(("buckets", "reach"), [(4, 16), (8, 11), (None, 6)])
@pytest.mark.parametrize("share", [True, False])
def test_deberta_second_version(terms, buckets, reach, share):
    config = transformers.DebertaV2Config(
        **SIZES,
        max_position_embeddings=32,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=terms,
        max_relative_positions=reach,
        position_biased_input=False,
        position_buckets=buckets or -1,
        share_att_key=share,
        norm_rel_ebd="layer_norm",
    )
    theirs = random_weights(transformers.DebertaV2Model(config))
    position = {
        "type": "deberta",
        "terms": terms,
        "max_distance": reach,
        "buckets": buckets,
        "share_projections": share,
    }
    ours = XFormerModel(XFormerConfig(**SIZES, **POST_LN, position={**position, "normalize": True})).double().eval()
    ours.trunk.embedding.tokens.weight.copy_(theirs.embeddings.word_embeddings.weight)
    copy_norm(ours.trunk.embedding.norm, theirs.embeddings.LayerNorm)
    ours.trunk.position.table.weight.copy_(theirs.encoder.rel_embeddings.weight)
    copy_norm(ours.trunk.position.norm, theirs.encoder.LayerNorm)
    for one, other in zip(ours.trunk.layers, theirs.encoder.layer, strict=True):
        copy_layer(one, other)
        own = other.attention.self
        copy_projections(one, own, ("query_proj", "key_proj", "value_proj"))
        if not share and "c2p" in terms:
            copy_linear(one.attention.position_terms.key_proj, own.pos_key_proj)
        if not share and "p2c" in terms:
            copy_linear(one.attention.position_terms.query_proj, own.pos_query_proj)
    compare(ours, theirs)
