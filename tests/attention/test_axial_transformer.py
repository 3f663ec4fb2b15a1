"""The Axial Transformer against its equations, dense and over one axis at a time, and against axial-attention."""

import pytest
import torch

from hf_xformers.core.cache import make_cache
from hf_xformers.ops.common.token_grid import TokenGrid
from hf_xformers.variants.axial_transformer import (
    XFAxialTransformerConfig,
    XFAxialTransformerForCausalLM,
    XFAxialTransformerForMaskedLM,
)
from hf_xformers.variants.vision_transformer import (
    XFVisionTransformerConfig,
    XFVisionTransformerForImageClassification,
)
from tests.attention.references.table import softmax_attention
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens

COLUMNS = 4
SPEC = {"type": "axial_transformer", "columns": COLUMNS}


def build(cls, attention=SPEC, **fields):
    torch.manual_seed(0)
    given = {**GEOMETRY, "num_hidden_layers": 6, "attention": attention, **fields}
    return make_strong(cls(XFAxialTransformerConfig(**given)).double().eval(), amount=0.3)


@torch.no_grad()
def decoded_by_hand(model, embedded):
    """Last states [1, T, D] of a decoder: masked dense attention in every layer, and rows moved down by a loop."""
    trunk, length = model.model.trunk, embedded.shape[1]
    place = torch.arange(length)
    row, column = ((place[:, None] // COLUMNS == place // COLUMNS), (place[:, None] % COLUMNS == place % COLUMNS))
    earlier, outer = place[:, None] >= place, model.config.stack.outer_layers(model.config)
    states = embedded
    for number, layer in enumerate(trunk.layers):
        if number == outer:
            moved = torch.zeros_like(embedded)
            for i in range(COLUMNS, length):
                moved[:, i] = states[:, i - COLUMNS]
            states = embedded + moved
        allowed = row & earlier if number >= outer else column & earlier if number % 2 else row
        read = layer.attention_residual.norm(states)
        states = states + softmax_attention(layer.attention, read, allowed=allowed)[0]
        states = states + layer.feedforward(layer.feedforward_residual.norm(states), None).output
    return trunk.final_norm(states)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("outer", [2, 4])
def test_composition(outer, implementation):
    model = build(XFAxialTransformerForCausalLM, stack={"type": "axial_transformer", "num_outer_layers": outer})
    model.set_attn_implementation(implementation)
    trunk = model.model.trunk
    for length in (14, 16, 3):
        ids = tokens(1, length, high=50)
        with torch.no_grad():
            embedded = trunk.position.embed(trunk.embedding.lookup(ids), torch.arange(length)[None])
            close(trunk(ids).last_hidden_state, decoded_by_hand(model, embedded))


def test_generation_runs_outer_layers_once_per_row():
    model = build(XFAxialTransformerForCausalLM)
    calls, ids = [], tokens(2, 18, high=50)
    model.model.trunk.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        expected, cache = model(ids, use_cache=False).logits, make_cache(model.config)
        calls.clear()
        found = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(18)]
    close(torch.cat(found, 1), expected)
    assert len(calls) == 1 + 18 // COLUMNS


def copy_axis(layer, heads, theirs):
    """The projections of one of axial-attention's axes to `heads` of ours, without the output's bias."""
    at = slice(heads.start * layer.head_dim, heads.stop * layer.head_dim)
    key, value = theirs.to_kv.weight.chunk(2)
    for part, weight in ((layer.q_proj, theirs.to_q.weight), (layer.k_proj, key), (layer.v_proj, value)):
        part.weight[at].copy_(weight)
        part.bias.zero_()
    layer.o_proj.weight[:, at].copy_(theirs.to_out.weight)


@torch.no_grad()
def test_parity_with_axial_attention():
    axial = pytest.importorskip("axial_attention")
    states, rows = vectors(2, 5 * COLUMNS), 5
    for together in (True, False):
        torch.manual_seed(0)
        theirs = axial.AxialAttention(16, num_dimensions=2, heads=4, dim_index=-1, sum_axial_out=together).double()
        # Its first axis is that of rows' numbers, along which columns attend.
        columns, across = (part.fn for part in theirs.axial_attentions)
        expected = theirs(states.unflatten(1, (rows, COLUMNS))).flatten(1, 2)
        if together:
            (layer,) = build_layers({**SPEC, "sum_axial": True}, 1, num_attention_heads=8, head_dim=4)
            copy_axis(layer, range(0, 4), across)
            copy_axis(layer, range(4, 8), columns)
            layer.o_proj.bias.copy_(columns.to_out.bias + across.to_out.bias)
            found = run_layers([layer], states, make_context(20))[0].output
        else:
            row, column = build_layers(SPEC, 2)
            copy_axis(row, range(0, 4), across)
            copy_axis(column, range(0, 4), columns)
            row.o_proj.bias.copy_(across.to_out.bias)
            column.o_proj.bias.copy_(columns.to_out.bias)
            found = run_layers([column], states, make_context(20))[0].output
            found = run_layers([row], found, make_context(20))[0].output
        close(found, expected)


def test_images():
    """The columns are those of the patches; a token that is no patch, or an image of another size, is refused."""
    fields = dict(
        **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8},
        **{"image_size": (12, 20), "patch_size": 4, "attention": "axial_transformer", "add_pooler": False},
    )
    model = XFVisionTransformerForImageClassification(
        XFVisionTransformerConfig(**fields, embedding={"type": "patch", "class_token": False})
    ).eval()
    patterns = [layer.attention.pattern.mask(15, 15).sum(1).tolist() for layer in model.model.trunk.layers]
    assert patterns == [[5] * 15, [3] * 15]
    assert model(torch.randn(2, 3, 12, 20)).logits.shape == (2, 2)
    with pytest.raises(ValueError, match="reads images as the grid"):
        model(torch.randn(2, 3, 12, 24), interpolate_pos_encoding=True)
    with pytest.raises(ValueError, match="class_token=False"):
        XFVisionTransformerConfig(**fields)


def test_grid_of_a_text():
    config = XFAxialTransformerConfig(max_position_embeddings=4096)
    assert config.attention.token_grid(config) == TokenGrid(64, 64) and config.position.grid(config) == (64, 64)
    config = XFAxialTransformerConfig(max_position_embeddings=513)
    assert config.attention.columns_in(config) == 23 and config.position.grid(config) == (23, 23)
    assert (
        XFAxialTransformerForMaskedLM(XFAxialTransformerConfig(**GEOMETRY))(tokens(1, 24, high=50))
        .logits.isfinite()
        .all()
    )
