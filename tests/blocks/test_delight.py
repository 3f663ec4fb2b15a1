"""DeLighT: widths and groups of its transformations, group maps as block matrices, and published sizes."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig
from hf_xformers.blocks.delight import GroupLayer, GroupLinear, layer_sizes
from hf_xformers.variants import config_class
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8)


def config(**fields):
    block = {"type": "delight", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


@pytest.mark.parametrize(
    ("width", "depth", "expected", "parameters"),
    [
        (512, 4, [(256, 256, 2), (512, 1024, 4), (1280, 1024, 4), (1280, 256, 2)], 657_920),
        (128, 4, [(64, 64, 2), (128, 256, 4), (320, 256, 4), (320, 64, 2)], 41_600),
        (512, 2, [(256, 256, 2), (512, 256, 2)], None),
        (512, 5, [(256, 256, 2), (512, 640, 4), (896, 1024, 8), (1280, 640, 4), (896, 256, 2)], None),
    ],
)
def test_tables(width, depth, expected, parameters):
    found = layer_sizes(width, depth, 2.0, 8)
    assert found == [GroupLayer(*entry) for entry in expected]
    made = config(hidden_size=width)
    layers = [GroupLinear(made, sizes, shuffle=True, activation="silu") for sizes in found]
    if parameters is not None:
        assert sum(layer.weight.numel() + layer.bias.numel() for layer in layers) == parameters


@pytest.mark.parametrize("most", [3, 5, 6, 16])
def test_any_number_of_groups_shares_the_channels(most):
    for sizes in layer_sizes(480, 7, 2.0, most):
        assert sizes.inputs % sizes.groups == sizes.outputs % sizes.groups == 0


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_are_a_block_matrix(groups, shuffle):
    """One dense matrix with blocks on its diagonal; of one group, a linear map."""
    layer = randomized(GroupLinear(config(), GroupLayer(16, 32, groups), shuffle, "silu"), 0.5)
    x = vectors(2, 3)
    dense = torch.block_diag(*layer.weight) if groups > 1 else layer.weight[0]
    product = x @ dense + layer.bias.flatten()
    close(layer.product(x).flatten(-2), product)
    size = 32 // groups
    if shuffle:  # the first channels of all groups come first
        order = [group * size + place for place in range(size) for group in range(groups)]
        product = product[..., order]
    expected = torch.stack(list(product.split(size, dim=-1)), dim=-2)
    mean, variance = expected.mean(-1, keepdim=True), expected.var(-1, keepdim=True, unbiased=False)
    normed = (expected - mean) / (variance + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
    close(layer(x), (normed * torch.sigmoid(normed)).flatten(-2))


@torch.no_grad()
def test_transformation_by_hand():
    """Written out channel by channel: which channels each group of each layer reads."""
    made = config(block={"min_depth": 3, "max_depth": 3, "shuffle": False, "max_groups": 4})
    dextra = randomized(made.block.build(made, layer_idx=0).transformed.dextra, 0.5)
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = nn.functional.silu(dextra.norm(dextra.up_proj(x)))
    hidden = dextra.layers[0](first)
    for layer in list(dextra.layers)[1:]:
        size, per_first, per_hidden = (
            layer.sizes.groups,
            16 // layer.sizes.groups,
            hidden.shape[-1] // layer.sizes.groups,
        )
        mixed = []
        for group in range(size):
            mixed.append(first[:, group * per_first : (group + 1) * per_first])
            mixed.append(hidden[:, group * per_hidden : (group + 1) * per_hidden])
        hidden = layer(torch.cat(mixed, dim=-1))
    joined = dextra.output_norm(dextra.down_proj(torch.cat([first, hidden], dim=-1)))
    close(dextra(x), nn.functional.silu(joined))
    other = x.clone()
    other[2] += 1.0  # no token reads another one
    rows = [0, 1, 3, 4]
    close(dextra(other)[rows], dextra(x)[rows])


PUBLISHED = {384: 23.25e6, 512: 36.76e6, 640: 54.04e6}
TABLE = 44_000 * 128


def layer_parameters(width):
    """Of eight layers on each side."""
    made = config_class("xf_delight")(hidden_size=width, intermediate_size=width // 4, is_encoder_decoder=True)
    with torch.device("meta"):
        towers = [made.tower("trunk"), made.tower("decoder")]
        layers = [
            view.block.build(view, layer_idx=index, cross=view.is_decoder) for view in towers for index in range(8)
        ]
    return sum(x.numel() for layer in layers for x in layer.parameters())


def test_published_parameters():
    """Released models for WMT 14 English-German, with a table of 44,000 tokens and width 128. What is missing is the
    network that makes the table's rows wider: its size is linear in the width, as far as the published totals, which
    are rounded to 10,000, can tell. (Any term in the square of the width would show.)"""
    missing = {width: total - layer_parameters(width) - TABLE for width, total in PUBLISHED.items()}
    for width, total in PUBLISHED.items():
        assert layer_parameters(width) + TABLE == pytest.approx(total, rel=0.03)
    assert abs(missing[640] - 2 * missing[512] + missing[384]) <= 4 * 5_000
    assert missing[384] > 0


def test_attention_by_torch():
    """One head over the transformed tokens, with an output of the whole width."""
    made = config(is_decoder=True)
    module = randomized(made.block.build(made, layer_idx=1).transformed, 0.5)
    states = torch.cat([vectors(2, 6), vectors(2, 6, seed=5)], dim=-1)
    context = make_context(6, True)
    module.prepare(context, None)
    found = module(states, context).output
    x, attention = module.dextra(states), module.attention
    query, key, value = (projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    scores = (query @ key.mT / 16**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    close(found, attention.o_proj(scores.softmax(-1) @ value))
    assert found.shape == (2, 6, 32)
