"""Every engine and every stack: each method works on a family, compared with gates and with layers that hand on, or
is refused with a reason."""

import pytest
import torch

from hf_xformers.compression.geometry import towers_of
from hf_xformers.compression.head_pruning import head_layers, prune_heads
from hf_xformers.compression.layers import prune_layers
from hf_xformers.compression.weights import apply_masks, magnitude_masks, prunable_weights
from hf_xformers.variants import config_class, family
from tests.helpers import make_strong, tiny_fields

# By family: what of heads, layers and weights is refused, and a word of the reason.
FAMILIES: dict[str, dict[str, str]] = {
    "bert": {},
    "bigbird": {"heads": "attention 'bigbird' .* know of each other"},
    "deberta": {"layers": "stack 'enhanced_mask_decoder'"},
    "delta_net": {},
    "funnel_transformer": {"layers": "stack 'funnel'"},
    "hi_transformer": {},
    "linear_transformer": {},
    "linformer": {},
    "longformer": {},
    "luna": {"heads": "heads must make up `hidden_size`"},
    "memformer": {"heads": "memformer's slots"},
    "nystromformer": {},
    "performer": {},
    "realformer": {},
    "reformer": {},
    "routing_transformer": {"heads": "centroids .* cannot be cut"},
    "star_transformer": {"heads": "know of each other"},
    "t5": {},
    "tener": {"heads": "no output projection that they enter side by side"},
    "transformer_xl": {},
    "universal_transformer": {"layers": "runs 1 layers at 2 depths"},
}


def model_of(name: str):
    cls = config_class(f"xf_{name}")
    head = next(head for head in ("ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM", "Model") if head in cls.heads)
    kind = {"ForCausalLM": "decoder", "ForSeq2SeqLM": "seq2seq"}.get(head, "encoder")
    fields = tiny_fields(cls, kind)
    shape = {
        "decoder": {"is_decoder": True, "is_encoder_decoder": False},
        "seq2seq": {"is_decoder": False, "is_encoder_decoder": True},
        "encoder": {},
    }
    torch.manual_seed(0)
    model = family(f"xf_{name}")[head](cls(**{**fields, **shape[kind]}))
    return make_strong(model).eval()


def without_heads(model):
    layers = head_layers(model)
    kept = {layer.key: [layer.heads_of(range(1, layer.units))] * len(layer.modules) for layer in layers}
    return prune_heads(model, kept)


def without_layers(model):
    count = {name: tower.config.num_hidden_layers for name, tower in towers_of(model).items()}
    return prune_layers(model, {name: list(range(number - 1)) for name, number in count.items()})


def without_weights(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = prunable_weights(model)
    apply_masks(weights, magnitude_masks({name: module.weight for name, module in weights.items()}, 0.5))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor[tensor != 0], before[name][tensor != 0])
    return model


METHODS = {"heads": without_heads, "layers": without_layers, "weights": without_weights}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_pruned_or_refused(name):
    for method, run in METHODS.items():
        model = model_of(name)
        if method in FAMILIES[name]:
            with pytest.raises(ValueError, match=FAMILIES[name][method]):
                run(model)
            continue
        size = model.num_parameters()
        pruned = run(model)
        assert (pruned.num_parameters() < size) == (method != "weights")
