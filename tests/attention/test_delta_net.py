"""Delta networks against the token recurrence, transformers' delta rule, what they overwrite, and the implied
weights."""

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from tests.attention.references.linear import delta_tensors
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close

D = WIDTH // HEADS
SPECS = {
    "dpfp": {"type": "delta_net", "chunk_size": 4},
    "dpfp_1": {"type": "delta_net", "nu": 1, "chunk_size": 3, "bias": False},
    "elu": {"type": "delta_net", "feature_map": "elu", "chunk_size": 5},
    "favor": {"type": "delta_net", "feature_map": "favor", "num_features": 3, "chunk_size": 4},
    "normalized": {"type": "delta_net", "attention_normalize": True, "chunk_size": 4},
    "favor_normalized": {"type": "delta_net", "feature_map": "favor", "attention_normalize": True, "chunk_size": 3},
}


def build(spec, **fields):
    (layer,) = build_layers(spec, causal=True, **fields)
    if layer.num_rows is not None:
        layer.directions.copy_(layer.draw(0))
    return layer


def test_transformers_delta_rule():
    """transformers' recurrent gated delta rule without decay, which scales queries by 1 / sqrt(F) and works in
    float32."""
    spec = SPECS["dpfp"]
    (layer,) = build_layers(spec, causal=True)
    states = vectors(2, 9)
    with torch.no_grad():
        q, k, v, beta = delta_tensors(layer, states)
        q = q * q.shape[-1] ** 0.5 / D**0.5
        arguments = [x.transpose(1, 2).float() for x in (q, k, v, torch.zeros_like(beta), beta)]
        theirs, _ = torch_recurrent_gated_delta_rule(*arguments, initial_state=None, output_final_state=False)
        expected = layer.o_proj(theirs.double().flatten(2))
        close(run_layers([layer], states, make_context(9, True))[0].output, expected, 1e-5)


def test_overwriting():
    """A key written again with full strength returns its new value alone, where a sum would return both."""
    (layer,) = build_layers({"type": "delta_net", "nu": 1, "scale": 1.0, "bias": False}, causal=True)
    one_hot, values = torch.zeros(1, 2, WIDTH).double(), torch.randn(2, WIDTH, dtype=torch.float64)
    one_hot[0, :, 0], one_hot[0, 0, 2], one_hot[0, 1, 3] = 1.0, 1.0, 1.0
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):  # both tokens ask and write with the features of (1, 1, 0, 0)
            projection.weight.zero_()
            for head in range(HEADS):
                projection.weight[head * D : head * D + 2, 0] = 1.0
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, 2], layer.v_proj.weight[:, 3] = values[0], values[1]
        layer.beta_proj.weight.zero_()
        layer.beta_proj.weight[:, 0] = 40.0
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
        outputs = run_layers([layer], one_hot, make_context(2, True))[0].output[0]
    close(outputs, values, 1e-12)


def test_what_is_divided():
    """One key written again and again with full strength: with a_t times its value held, a_t = a_{t-1} + (1 - a_{t-1}
    / (t - 1)), it reads a_t / t of it, which is 1 and from then on 1 / 2."""
    layer = build(
        {"type": "delta_net", "feature_map": "elu", "attention_normalize": True, "bias": False, "scale": 1.0}
    )
    states = vectors(1, 1).repeat(1, 5, 1)
    with torch.no_grad():
        layer.beta_proj.weight.copy_(40.0 * states[0, 0] / states[0, 0].square().sum())
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
        found = run_layers([layer], states, make_context(5, True))[0].output[0]
        value = layer.v_proj(states)[0, 0]
    for t in range(5):
        close(found[t], value * (1.0 if t == 0 else 0.5), 1e-3)


def test_draws():
    """The random rows of `favor` are a buffer; other features have none."""
    layer = build(SPECS["favor"])
    assert layer.draw(0).shape == (3, D)
    assert {name for name, _ in layer.named_buffers()} == {"directions", "passes", "draws"}
    assert build(SPECS["favor_normalized"]).draw(0).shape == (D, D)
    assert not list(build(SPECS["elu"]).buffers())


def test_stability():
    """Normalised features keep the state bounded, however long the text and however large the keys."""
    for name in ("dpfp", "elu", "favor", "normalized"):
        layer = build(SPECS[name])
        with torch.no_grad():
            output = run_layers([layer], 30 * vectors(1, 300), make_context(300, True))[0].output
        assert output.abs().max() < 1e4
