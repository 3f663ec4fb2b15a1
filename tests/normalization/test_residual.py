"""Where a sublayer normalises: by formula, and against torch's own layers with copied weights."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.core.components import build_spec
from tests.helpers import close, make_strong

WIDTH, HEADS, INNER, LAYERS = 16, 4, 24, 2
GEOMETRY = dict(
    vocab_size=40,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_hidden_layers=LAYERS,
    intermediate_size=INNER,
    position="none",
)


def vectors(batch, length, seed=0):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def frame(name, scale=1.0, **fields):
    config = XFormerConfig(**GEOMETRY, residual={"type": name, **fields})
    return make_strong(config.residual.build(config, scale=scale, layer_idx=0).double().eval(), amount=0.5)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_order(scale):
    """post: LN(x + f(x)); pre: x + f(LN(x)); the block's scale and the sublayer's gate act on f's output alone."""
    states, gate = vectors(2, 3), torch.rand(2, 3, 1, dtype=torch.float64)

    def function(x):
        return 2 * x + 1

    for given in (None, gate):
        factor = scale if given is None else scale * given
        post = frame("post_ln", scale)
        assert torch.equal(post.enter(states), states)
        close(post.leave(states, function(states), given), post.norm(states + factor * function(states)))
        pre = frame("pre_ln", scale)
        close(pre.leave(states, function(pre.enter(states)), given), states + factor * function(pre.norm(states)))


def test_a_factor_on_every_branch():
    """Beside the block's own, and where a sublayer has no norm."""
    states = vectors(2, 3)
    for fields in ({}, {"first_norm": False}):
        made = frame("pre_ln", 0.5, branch_scale=0.3, **fields)
        close(made.leave(states, 2 * states), states + 0.15 * 2 * states)


def test_a_factor_on_the_stream():
    states = vectors(2, 3)
    made = frame("post_ln", 0.5, stream_scale=1.7)
    close(made.leave(states, 2 * states), made.norm(1.7 * states + 0.5 * 2 * states))


def test_dropout_acts_before_the_sum():
    """The branch is dropped, the residual stream is not."""
    config = XFormerConfig(**GEOMETRY, hidden_dropout_prob=0.5, residual="pre_ln")
    module = config.residual.build(config).double().train()
    states = vectors(8, 50)
    torch.manual_seed(0)
    added = module.leave(states, torch.ones_like(states)) - states
    assert set(added.round(decimals=6).unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("post_ln", {}, None),
        ("post_ln", {"final_norm": True}, nn.LayerNorm),
        ("pre_ln", {}, nn.LayerNorm),
        ("pre_ln", {"final_norm": False}, None),
        ("pre_ln", {"final_dropout": True}, nn.Sequential),
        ("pre_ln", {"final_norm": False, "final_dropout": True}, nn.Dropout),
    ],
)
def test_final_norm(name, fields, expected):
    config = XFormerConfig(**GEOMETRY, residual={"type": name, **fields})
    module = build_spec("residual", config.residual).build_final(config)
    assert module is None if expected is None else type(module) is expected
    model = XFormerModel(config)
    assert type(model.trunk.final_norm) is type(module)


def copy_attention(theirs: nn.MultiheadAttention, ours):
    """torch stacks the three input projections."""
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for projection, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, biases):
        projection.weight.copy_(weight)
        projection.bias.copy_(bias)
    ours.o_proj.load_state_dict(theirs.out_proj.state_dict())


def copy_layer(theirs, ours):
    with torch.no_grad():
        copy_attention(theirs.self_attn, ours.attention)
        norms = [ours.attention_residual.norm]
        if hasattr(theirs, "multihead_attn"):
            copy_attention(theirs.multihead_attn, ours.cross_attention)
            norms.append(ours.cross_attention_residual.norm)
        norms.append(ours.feedforward_residual.norm)
        ours.feedforward.up_proj.load_state_dict(theirs.linear1.state_dict())
        ours.feedforward.down_proj.load_state_dict(theirs.linear2.state_dict())
        for index, norm in enumerate(norms, start=1):
            norm.load_state_dict(getattr(theirs, f"norm{index}").state_dict())


def pair(norm_first, two_towers):
    """Our stack and torch's, with the same weights."""
    torch.manual_seed(0)
    activation = "gelu"
    fields = dict(residual="pre_ln" if norm_first else "post_ln", feedforward="gelu", is_encoder_decoder=two_towers)
    model = XFormerModel(XFormerConfig(**GEOMETRY, **fields)).double().eval()
    options = dict(
        d_model=WIDTH, nhead=HEADS, dim_feedforward=INNER, dropout=0.0, activation=activation, batch_first=True,
        norm_first=norm_first, dtype=torch.float64,
    )  # fmt: skip
    sides = [(model.trunk, nn.TransformerEncoder, nn.TransformerEncoderLayer)]
    if two_towers:
        sides.append((model.decoder, nn.TransformerDecoder, nn.TransformerDecoderLayer))
    stacks = []
    for tower, stack_class, layer_class in sides:
        norm = nn.LayerNorm(WIDTH, dtype=torch.float64) if norm_first else None
        more = {"enable_nested_tensor": False} if stack_class is nn.TransformerEncoder else {}
        stack = make_strong(stack_class(layer_class(**options), LAYERS, norm=norm, **more).eval(), amount=0.2)
        make_strong(stack, seed=5, amount=0.2)
        for theirs, ours in zip(stack.layers, tower.layers):
            copy_layer(theirs, ours)
        if norm is not None:
            tower.final_norm.load_state_dict(stack.norm.state_dict())
        stacks.append(stack)
    return model, stacks


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_encoder_equals_torch(norm_first):
    model, (encoder,) = pair(norm_first, two_towers=False)
    states = vectors(2, 5)
    with torch.no_grad():
        close(model(inputs_embeds=states).last_hidden_state, encoder(states))
        ours = model(inputs_embeds=states, attention_mask=MASK).last_hidden_state
        theirs = encoder(states, src_key_padding_mask=MASK == 0)
        close(ours[MASK.bool()], theirs[MASK.bool()])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_encoder_decoder_equals_torch(norm_first):
    model, (encoder, decoder) = pair(norm_first, two_towers=True)
    source, target = vectors(2, 5), vectors(2, 4, seed=1)
    order = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    with torch.no_grad():
        ours = model(inputs_embeds=source, attention_mask=MASK, decoder_inputs_embeds=target).last_hidden_state
        memory = encoder(source, src_key_padding_mask=MASK == 0)
        theirs = decoder(target, memory, tgt_mask=order, memory_key_padding_mask=MASK == 0, tgt_is_causal=True)
    close(ours, theirs)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_frames_that_normalise_what_sublayers_give(scale):
    """res_post: x + LN(f(x)); peri: x + LN_out(f(LN(x))); scale and gate act on what is added."""
    states, gate = vectors(2, 3), torch.rand(2, 3, 1, dtype=torch.float64)

    def function(x):
        return 2 * x + 1

    for given in (None, gate):
        factor = scale if given is None else scale * given
        out = frame("res_post_ln", scale)
        assert torch.equal(out.enter(states), states)
        close(out.leave(states, function(states), given), states + factor * out.norm(function(states)))
        peri = frame("peri_ln", scale)
        entered = peri.enter(states)
        close(entered, peri.norm(states))
        expected = states + factor * peri.output_norm(function(entered))
        close(peri.leave(states, function(entered), given), expected)
        assert not torch.equal(peri.norm.weight, peri.output_norm.weight)


def test_the_first_sublayer_may_go_without_a_norm():
    """The first of the tower alone."""
    made = XFormerConfig(**GEOMETRY, residual={"type": "pre_ln", "first_norm": False})
    names = [name for name, _ in XFormerModel(made).named_parameters() if "_residual.norm.weight" in name]
    kept = [f"trunk.layers.{i}.{part}_residual.norm.weight" for i in range(2) for part in ("attention", "feedforward")]
    assert names == kept[1:]
