"""Adaptively sparse attention against alpha-entmax of the written-out scores, and its limit, softmax attention."""

import torch

from hf_xformers.variants import family
from tests.attention.score_helpers import GEOMETRY, HEADS, PADDING, build_layers, make_context, run_layers, vectors
from tests.helpers import close

SPECS = {
    "learned": "adaptively_sparse",
    "shared": {"type": "adaptively_sparse", "share_alpha": True},
    "bounded": {"type": "adaptively_sparse", "alpha_min": 1.5},
    **{f"alpha {a}": {"type": "adaptively_sparse", "alpha": a} for a in (1, 1.3, 1.5, 2)},
}


def test_softmax_is_the_limit():
    (layer,), (dense,) = build_layers({"type": "adaptively_sparse", "alpha": 1}), build_layers("dense")
    dense.load_state_dict(layer.state_dict())
    states, context = vectors(4, 6), {"padding_mask": PADDING}
    close(*(run_layers([one], states, make_context(6, **context))[0].output for one in (layer, dense)))
    (near,) = build_layers("adaptively_sparse")
    near.load_state_dict({**layer.state_dict(), "shape": torch.full((HEADS,), -40.0)})  # held at `alpha_min`
    outputs = [run_layers([one], states, make_context(6, **context))[0].output for one in (near, dense)]
    close(*outputs, 3e-2)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-5


def test_alphas_of_each_head_and_layer():
    """Drawn as N(0, 1), apart for each kind of attention; as many as heads, or one; none where alpha is given."""
    for name, count in (("learned", HEADS), ("shared", 1), ("alpha 1.5", 0)):
        (layer,) = build_layers(SPECS[name])
        assert sum(p.numel() for key, p in layer.named_parameters() if "proj" not in key) == count
    fields = {**GEOMETRY, "num_attention_heads": 16, "is_encoder_decoder": True}
    model_class = family("xf_adaptively_sparse_transformer")["ForSeq2SeqLM"]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    drawn = torch.stack([p for name, p in model.named_parameters() if name.endswith("attention.shape")])
    assert drawn.shape == (9, 16) and 0.8 < drawn.std() < 1.2 and len(drawn.flatten().unique()) == drawn.numel()
