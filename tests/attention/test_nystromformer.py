"""Nystromformer against its equation text by text, transformers' and the authors' form, and exact attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerModel, NystromformerSelfAttention

from hf_xformers import XFNystromformerConfig, XFNystromformerModel, XFormerConfig
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

D = WIDTH // HEADS
SPEC = {"type": "nystromformer", "num_landmarks": 3, "conv_kernel_size": 3}
PLAIN = {**SPEC, "conv_kernel_size": None}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def pinv(matrix, steps):
    """Equation 11, from the start 1 / (|A|_1 |A|_inf) A^T."""
    if steps is None:
        return torch.linalg.pinv(matrix)
    found, one = matrix.t() / (matrix.sum(0).max() * matrix.sum(1).max()), torch.eye(len(matrix)).double()
    for _ in range(steps):
        product = matrix @ found
        found = found / 4 @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return found


@torch.no_grad()
def by_hand(layer, states, mask=None):
    """One text and one head at a time, on its real tokens alone -> outputs and weights."""
    most, steps = layer.spec.num_landmarks, layer.spec.pinv_iterations
    tensors = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in tensors)
    outputs, weights = torch.zeros_like(v), torch.zeros(*v.shape[:3], v.shape[2], dtype=v.dtype)
    for b in range(states.shape[0]):
        real = torch.ones(states.shape[1]).bool() if mask is None else mask[b]
        count = int(real.sum())
        if not count:
            continue
        for h in range(HEADS):
            qs, ks, vs = q[b, h, real], k[b, h, real], v[b, h, real]
            mean_q, mean_k = (
                torch.stack([part.mean(0) for part in x.tensor_split(min(most, count))]) for x in (qs, ks)
            )
            soft = [
                (one @ other.t() / D**0.5).softmax(-1) for one, other in ((qs, mean_k), (mean_q, mean_k), (mean_q, ks))
            ]
            matrix = soft[0] @ pinv(soft[1], steps) @ soft[2] if count > most else (qs @ ks.t() / D**0.5).softmax(-1)
            places = real.nonzero()[:, 0]
            weights[b, h][places[:, None], places[None]] = matrix
            outputs[b, h, real] = matrix @ vs
            if layer.conv is not None:
                kernel = layer.conv.weight[h, 0, :, 0]
                side = len(kernel) // 2
                for i in range(count):
                    for offset in range(-side, side + 1):
                        if 0 <= i + offset < count:
                            outputs[b, h, places[i]] += kernel[side + offset] * vs[i + offset]
    return layer.o_proj(outputs.transpose(1, 2).flatten(2)), weights


SPECS = {
    "conv": SPEC,
    "plain": PLAIN,
    "exact_inverse": {**PLAIN, "pinv_iterations": None, "num_landmarks": 2},
    "many_landmarks": {**SPEC, "num_landmarks": 4, "pinv_iterations": 12, "conv_kernel_size": 5},
}


@each_path
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equation(implementation, spec):
    for fields in ({}, {"num_key_value_heads": 2}):
        (layer,) = build_layers(spec, **fields)
        states = vectors(4, 6)
        for mask in (None, PADDING):
            real = torch.ones(4, 6).bool() if mask is None else mask
            (result,) = run_layers([layer], states, make_context(6, padding_mask=mask, implementation=implementation))
            output, weights = by_hand(layer, states, mask)
            close(result.output[real].detach(), output[real], 1e-8)
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows, 1e-8)


def copy_attention(ours, theirs):
    with torch.no_grad():
        for own, other in ((ours.q_proj, theirs.query), (ours.k_proj, theirs.key), (ours.v_proj, theirs.value)):
            own.load_state_dict(other.state_dict())
        if ours.conv is not None:
            ours.conv.load_state_dict(theirs.conv.state_dict())


@each_path
def test_transformers_attention(implementation):
    """Weight-copy parity where transformers' class is defined: a fixed length, no padding, its start for the
    inverse."""
    fields = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_landmarks": 4, "conv_kernel_size": 5}
    torch.manual_seed(0)
    theirs = NystromformerSelfAttention(NystromformerConfig(**fields, segment_means_seq_len=12)).double().eval()
    (ours,) = build_layers({"type": "nystromformer", "num_landmarks": 4, "conv_kernel_size": 5, "pinv_init": "global"})
    copy_attention(ours, make_strong(theirs, amount=0.4))
    states = vectors(3, 12)
    with torch.no_grad():
        # Their identity matrix is in float32, which rounds nothing.
        expected = ours.o_proj(theirs(states)[0])
        (result,) = run_layers([ours], states, make_context(12, implementation=implementation))
    close(result.output, expected)


@pytest.mark.parametrize("landmarks", [4, 12])
def test_transformers_model(landmarks):
    """The whole encoder: with 12 landmarks for 12 tokens both have exact attention."""
    sizes = {
        "vocab_size": 60,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 12,
        **NO_DROPOUT,
    }
    del sizes["activation_dropout_prob"]
    config = NystromformerConfig(**sizes, num_landmarks=landmarks, segment_means_seq_len=12, conv_kernel_size=5)
    config.hidden_act = "gelu"
    torch.manual_seed(0)
    theirs = make_strong(NystromformerModel(config)).double().eval()
    spec = {"type": "nystromformer", "num_landmarks": landmarks, "conv_kernel_size": 5, "pinv_init": "global"}
    ours = XFNystromformerModel(
        XFNystromformerConfig(
            **sizes,
            activation_dropout_prob=0.0,
            attention=spec,
            type_vocab_size=2,
            layer_norm_eps=config.layer_norm_eps,
            embedding={"type": "token", "normalize": True},
        )
    )
    ours = ours.double().eval()
    embedding, source = ours.trunk.embedding, theirs.embeddings
    with torch.no_grad():
        embedding.tokens.weight.copy_(source.word_embeddings.weight)
        ours.trunk.position.table.weight.copy_(source.position_embeddings.weight[2:])
        embedding.types.weight.copy_(source.token_type_embeddings.weight)
        embedding.norm.load_state_dict(source.LayerNorm.state_dict())
        for own, other in zip(ours.trunk.layers, theirs.encoder.layer, strict=True):
            copy_attention(own.attention, other.attention.self)
            own.attention.o_proj.load_state_dict(other.attention.output.dense.state_dict())
            own.attention_residual.norm.load_state_dict(other.attention.output.LayerNorm.state_dict())
            own.feedforward.up_proj.load_state_dict(other.intermediate.dense.state_dict())
            own.feedforward.down_proj.load_state_dict(other.output.dense.state_dict())
            own.feedforward_residual.norm.load_state_dict(other.output.LayerNorm.state_dict())
        ids = tokens(2, 12, high=60)
        close(ours(input_ids=ids).last_hidden_state, theirs(input_ids=ids).last_hidden_state, 1e-7)


def test_exact_attention_is_the_limit():
    """As many landmarks as tokens, or one-token segments through an exact inverse."""
    states = vectors(2, 6)
    (layer,) = build_layers({**PLAIN, "num_landmarks": 6})
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6))[0].output, expected, 1e-12)
        for path in ("sdpa", "eager"):  # landmarks for texts of their own number
            (layer,) = build_layers({**PLAIN, "num_landmarks": 2, "text_length": 2})
            close(run_layers([layer], states, make_context(6, implementation=path))[0].output, expected, 1e-12)
        # Twice the same text: segments of two equal tokens are the tokens themselves.
        doubled = states.repeat_interleave(2, dim=1)
        (layer,) = build_layers({**PLAIN, "num_landmarks": 6, "pinv_iterations": None})
        close(run_layers([layer], doubled, make_context(12))[0].output[:, ::2], expected, 1e-8)


def test_constant_values_are_kept_by_the_exact_inverse():
    (layer,) = build_layers({**PLAIN, "pinv_iterations": None})
    with torch.no_grad():
        weights = run_layers([layer], vectors(2, 9), make_context(9, implementation="eager"))[0].weights
    close(weights.sum(-1), torch.ones_like(weights.sum(-1)), 1e-8)


def test_rows_of_a_batch_are_alone():
    """Unlike with the `global` start of the inverse."""
    states, moved = vectors(2, 9), {}
    states[1] *= 5
    for start in ("per_matrix", "global"):
        (layer,) = build_layers({**PLAIN, "pinv_init": start})
        with torch.no_grad():
            together = run_layers([layer], states, make_context(9))[0].output[:1]
            moved[start] = (together - run_layers([layer], states[:1], make_context(9))[0].output).abs().max()
    assert moved["per_matrix"] < 1e-10 < moved["global"]


def test_what_is_kept():
    (layer,) = build_layers({**SPEC, "num_landmarks": 8})
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))
        assert sizes[0] <= length * max(WIDTH, 8 * HEADS), sizes[:3]


def test_refusals():
    for fields, message in (
        ({"num_landmarks": 0}, "`num_landmarks` >= 1, got 0"),
        ({"conv_kernel_size": 4}, "must be odd, got 4"),
        ({"pinv_iterations": 0}, "`pinv_iterations` >= 1"),
        ({"text_length": 8}, "`text_length` 8 must be a multiple of `num_landmarks` 3"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={**SPEC, **fields})
    with pytest.raises(ValueError, match="no causal form"):
        XFormerConfig(**GEOMETRY, attention="nystromformer", is_decoder=True)
    with pytest.raises(ValueError, match="cannot read a memory"):
        XFormerConfig(**GEOMETRY, cross_attention="nystromformer")


MIX = {"nystrom": {"attention": SPEC, "position": "rotary", "residual": "pre_ln", "num_key_value_heads": 2}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIX, ("encoder",)), ids=str)
def test_contract(case):
    check_contract(case)


SHALLOW = {"nystrom": {**MIX["nystrom"], "num_hidden_layers": 1}}


@pytest.mark.parametrize("case", mixes(SHALLOW, ("encoder",)), ids=str)
def test_compile(case):
    check_compile(case)


@each_path
def test_adapters_and_hooks_on_the_convolution_count(implementation):
    (layer,) = build_layers({"type": "nystromformer", "num_landmarks": 3})
    seen = []
    layer.conv.register_forward_hook(lambda module, given, output: seen.append(output.shape) or 2 * output)
    run_layers([layer], vectors(1, 9), make_context(9, implementation=implementation))
    assert seen == [(1, HEADS, 9, D)]
