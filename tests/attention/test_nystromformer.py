"""Nystromformer against its equation text by text, transformers' and the authors' form, and exact attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerModel, NystromformerSelfAttention

from hf_xformers import XFNystromformerConfig, XFNystromformerModel
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

D = WIDTH // HEADS
SPEC = {"type": "nystromformer", "num_landmarks": 3, "conv_kernel_size": 3}
PLAIN = {**SPEC, "conv_kernel_size": None}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


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


@each_path
def test_adapters_and_hooks_on_the_convolution_count(implementation):
    (layer,) = build_layers({"type": "nystromformer", "num_landmarks": 3})
    seen = []
    layer.conv.register_forward_hook(lambda module, given, output: seen.append(output.shape) or 2 * output)
    run_layers([layer], vectors(1, 9), make_context(9, implementation=implementation))
    assert seen == [(1, HEADS, 9, D)]
