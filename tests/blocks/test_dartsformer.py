"""DARTSformer: its cell by hand, its inverse, and choices with one heaviest operation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_xformers import XFormerConfig
from hf_xformers.blocks.dartsformer_operations import CANDIDATES
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()


def config(**fields):
    block = {"type": "dartsformer", **fields.pop("block", {})}
    residual = {"type": "post_ln", "final_norm": True}
    given = {**SIZES, "position": "none", "residual": residual, "feedforward": "relu", "block": block, **fields}
    return XFormerConfig(**given, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def layer_of(cross=False, layer_idx=0, **fields):
    made = config(**fields)
    view = made.tower("decoder") if cross else made
    return randomized(view.block.build(view, layer_idx=layer_idx, cross=cross))


def states_of(length, batch=2, seed=0):
    return torch.cat([vectors(batch, length, seed=seed + number) for number in range(3)], dim=-1)


def run(layer, states, context, memory=None):
    layer.prepare(context, None)
    return layer(states, memory, context=context, step=0)[0]


@torch.no_grad()
def test_two_parts_are_a_reversible_pair():
    """Y1 = X1 + LN(X2 + attention(X2)), Y2 = X2 + LN(Y1 + FF(Y1)), by torch's own attention."""
    layer, states = layer_of(), states_of(7)
    found = run(layer, states, make_context(7, padding_mask=REAL))
    (first, second), (x1, x2) = layer.cell.splits, states.chunk(2, -1)
    attention, ff = first.operations["attention"], second.operations["ffn"]
    reference = nn.MultiheadAttention(24, 2, batch_first=True).double()
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    reference.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in parts]),
            "in_proj_bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": attention.o_proj.weight,
            "out_proj.bias": attention.o_proj.bias,
        }
    )
    y1 = x1 + first.frames["attention"].norm(x2 + reference(x2, x2, x2, key_padding_mask=~REAL)[0])
    y2 = x2 + second.frames["ffn"].norm(y1 + ff.down_proj(F.relu(ff.up_proj(y1))))
    close(found[REAL], torch.cat([y1, y2], -1)[REAL])


EVERY = (("conv_3", "dynamic_conv_7"), ("glu", "conv_11"), ("zero", "identity"))


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("cross", [False, True])
@torch.no_grad()
def test_inverse(pooling, cross):
    """X comes back from Y, of two parts and of three with a memory, also with all candidates at once."""
    fields = {"is_encoder_decoder": True} if cross else {}
    memory = states_of(4, seed=7) if cross else None
    for block, layer_idx in (({"operations": EVERY}, 0), ({"operations": EVERY}, 1), ({"search": True}, 0)):
        layer, states = layer_of(cross, layer_idx, block={**block, "pooling": pooling}, **fields), states_of(6)
        context = make_context(6, cross)
        output = run(layer, states, context, memory)
        cell = layer.reading_cell if cross else layer.cell
        assert len(cell.splits) == 2 + cross
        close(cell.invert(output, context, memory), states)
        assert (output - states).abs().amax((0, 1)).min() > 1e-6  # every channel has changed


@torch.no_grad()
def test_heaviest_operation_is_the_derived_cell():
    """With all weight on one candidate, a choice is that operation; at the start it is the mean of all."""
    states = states_of(7)
    for chosen in CANDIDATES:
        mixed = layer_of(block={"search": True})
        derived = layer_of(block={"operations": ((chosen, "glu"),)})
        for split, name in zip(mixed.cell.splits, (chosen, "glu")):
            split.alpha.fill_(-1e4)
            split.alpha[CANDIDATES.index(name)] = 0.0
        own = mixed.state_dict()
        derived.load_state_dict({name: own[name] for name in derived.state_dict()})
        close(
            run(derived, states, make_context(7, padding_mask=REAL)),
            run(mixed, states, make_context(7, padding_mask=REAL)),
        )
    mixed.cell.splits[0].alpha.zero_()
    close(mixed.cell.splits[0].shares(), torch.full((len(CANDIDATES),), 1 / len(CANDIDATES), dtype=torch.float64))


@pytest.mark.parametrize("operation", ["conv_5", "conv_11", "dynamic_conv_3", "dynamic_conv_15"])
def test_reach_of_convolutions(operation):
    reach = int(operation.rpartition("_")[2])
    for causal in (False, True):
        layer = layer_of(is_decoder=causal, block={"operations": ((operation, "zero"),)})
        inputs = states_of(40, 1).requires_grad_()
        (slope,) = torch.autograd.grad(run(layer, inputs, make_context(40, causal))[0, 20].sum(), inputs)
        first, last = (20 - reach + 1, 20) if causal else (20 - reach // 2, 20 + reach // 2)
        assert (slope[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == list(range(first, last + 1))
