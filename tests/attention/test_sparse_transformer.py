"""The Sparse Transformer's sizes, positions and start; GPT-3's alternating layers."""

import json

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.ops.block_sparse import patterns
from hf_xformers.variants.gpt3_alternating import (
    XFGPT3AlternatingConfig,
)
from hf_xformers.variants.sparse_transformer import XFSparseTransformerConfig, XFSparseTransformerForCausalLM
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, tokens

STRIDE, WIDTH = 5, 2


def spec(**fields):
    return {"type": "sparse_transformer", "stride": STRIDE, "summary_width": WIDTH, **fields}


def test_default_summary_width():
    config = XFSparseTransformerConfig()
    assert config.attention.width_in(128) == 8 and config.attention.stride_of(config) == 111  # the root of 12288
    given = XFSparseTransformerConfig(attention={"type": "sparse_transformer", "stride": 128}).attention
    assert given.width_in(128) == 32
    for length, stride in ((1, 1), (16, 4), (17, 5), (4096, 64)):
        config = XFSparseTransformerConfig(max_position_embeddings=length)
        assert config.attention.stride_of(config) == stride
        assert config.attention.pattern(config, 0) == patterns.fixed(stride, min(stride, 8))
    for stride, verts in ((1, 1), (3, 3), (128, 8)):
        XFormerConfig(**GEOMETRY, attention={"type": "sparse_transformer", "stride": stride, "num_verts": verts})


def test_positions_are_those_of_rows_and_columns():
    """Sums of two vectors, in a grid whose rows are as long as the stride."""
    config = XFSparseTransformerConfig(
        **{**GEOMETRY, "max_position_embeddings": 23}, attention=spec(), hidden_dropout_prob=0.0
    )
    trunk = XFSparseTransformerForCausalLM(config).model.trunk
    rows, columns = trunk.position.tables
    assert rows.shape == (5, 16) and columns.shape == (STRIDE, 16)
    ids, places = tokens(1, 23, high=50), torch.arange(23)
    expected = trunk.embedding.tokens(ids)[0] + rows[places // STRIDE] + columns[places % STRIDE]
    found = trunk.embedding(trunk.embedding.lookup(ids), None, places[None], trunk.position)[0]
    close(found, expected, 1e-6)


def test_published_start():
    """Section 6: standard deviations by fan in, less for what writes to the residual stream, the output at zero."""
    fields = {**GEOMETRY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 500}
    config = XFSparseTransformerConfig(**fields)
    assert abs(XFSparseTransformerConfig().position.std - 0.125 / (2 * 512) ** 0.5) < 1e-12
    torch.manual_seed(0)
    model = XFSparseTransformerForCausalLM(config)
    layer, trunk = model.model.trunk.layers[1], model.model.trunk
    stds = {
        layer.attention.q_proj.weight: 0.125 / 256**0.5,
        layer.attention.v_proj.weight: 0.125 / 256**0.5,
        layer.attention.o_proj.weight: 0.125 / 256**0.5 / 6**0.5,
        layer.feedforward.up_proj.weight: 0.125 / 256**0.5,
        layer.feedforward.down_proj.weight: 0.125 / 512**0.5 / 6**0.5,
        trunk.embedding.tokens.weight: 0.125 / 256**0.5,
    }
    for weight, expected in stds.items():
        assert abs(weight.std().item() / expected - 1) < 0.02
    assert (model.lm_head.decoder.weight == 0).all()
    tied = XFSparseTransformerForCausalLM(XFSparseTransformerConfig(**fields, tie_word_embeddings=True))
    assert (tied.lm_head.decoder.weight != 0).all()


# ------------------------------------------------------------------------------------------------ GPT-3

SMALL = {
    **GEOMETRY,
    "num_hidden_layers": 3,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def gpt3(**fields):
    return XFGPT3AlternatingConfig(**{**SMALL, "window_size": 4, **fields})


def kinds(config):
    layers = [config.layer(i).attention.type for i in range(config.num_hidden_layers)]
    return "".join("B" if name == "band_attention" else "D" for name in layers)


def test_layers_take_turns(tmp_path):
    assert kinds(gpt3()) == "DBD"
    assert kinds(gpt3(first_layer="banded", num_hidden_layers=4)) == "BDBD"
    assert kinds(gpt3(num_hidden_layers=1)) == "D"
    own = gpt3(per_layer_config={1: {"feedforward": "relu"}, 2: {"attention": {"type": "dense", "bias": False}}})
    assert kinds(own) == "DBD" and own.layer(1).feedforward.type == "relu" and not own.layer(2).attention.bias
    # A saved config holds what was given, and what follows from it is made for the layers that it gets.
    assert "per_layer_config" not in json.loads(gpt3().to_json_string())
    own.save_pretrained(tmp_path)
    again = XFGPT3AlternatingConfig.from_pretrained(tmp_path)
    assert again.to_dict() == own.to_dict() and kinds(again) == "DBD" and again.layer(1).attention.window_size == 4
    changed = XFGPT3AlternatingConfig.from_pretrained(tmp_path, num_hidden_layers=5, window_size=2)
    assert kinds(changed) == "DBDBD" and changed.layer(3).attention.window_size == 2
    assert changed.layer(1).feedforward.type == "relu"
    with pytest.raises(ValueError, match="`window_size` must be at least 1.*got 0"):
        gpt3(window_size=0)
