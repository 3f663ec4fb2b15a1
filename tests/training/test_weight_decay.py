"""What weight decay leaves alone, and that the optimizer's groups say so."""

import pytest
from transformers import TrainingArguments

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.training.trainer import XFormerTrainer

SMALL = dict(vocab_size=20, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16)
CASES = {
    "learnable_sinusoidal": ({"position": "learnable_sinusoidal"}, "frequency"),
    "relative": ({"position": "learnable_sinusoidal_relative"}, "frequency"),
    "complex_order": (
        {
            "embedding": "complex_order",
            "attention": "complex_order",
            "position": "none",
            "feedforward": "complex_parts",
        },
        "embedding.tokens.weight",
    ),
    "admin": ({"residual": "admin"}, "omega"),
    "rezero": ({"residual": "rezero"}, "alpha"),
    "adaptive_span": ({"attention": "adaptive_span", "position": "none"}, "span"),
    "transformer_xl": ({"attention": "transformer_xl", "position": "none"}, "content_bias"),
    "power_norm": ({"normalization": "power_norm"}, "norm.weight"),
    "scale_norm": ({"normalization": "scale_norm"}, "norm.weight"),
    "rms_norm": ({"normalization": "rms_norm", "residual": "pre_ln"}, "final_norm.weight"),
    "feedback": ({"attention": "feedback", "stack": "feedback", "residual": "pre_ln"}, "mixture"),
}


def groups(model, folder):
    arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, weight_decay=0.1)
    optimizer = XFormerTrainer(model=model, args=arguments).create_optimizer()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {True: set(), False: set()}
    for group in optimizer.param_groups:
        found[group["weight_decay"] > 0].update(names[id(parameter)] for parameter in group["params"])
    return found[True], found[False]


@pytest.mark.parametrize("name", CASES)
def test_declared_parameters_do_not_decay(name, tmp_path):
    fields, expected = CASES[name]
    causal = name in ("feedback", "adaptive_span")
    model = (XFormerForCausalLM if causal else XFormerForMaskedLM)(
        XFormerConfig(**SMALL, **fields, tie_word_embeddings=False, is_decoder=causal)
    )
    decayed, left_out = groups(model, tmp_path)
    assert any(key.endswith(expected) for key in left_out) and not any(key.endswith(expected) for key in decayed)
    assert model.no_weight_decay() <= left_out
    assert any("up_proj" in key for key in decayed), "matrices decay"
    few = {key for key, parameter in model.named_parameters() if parameter.ndim < 2}
    assert few <= left_out, "vectors and numbers are gains, biases, frequencies, spans: none decays"


def test_an_adapter_s_names(tmp_path):
    """Through a wrapper the names are the wrapper's."""
    import peft

    base = XFormerForMaskedLM(XFormerConfig(**SMALL, residual="rezero"))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("alpha" in key or "lora" in key)
    decayed, left_out = groups(model, tmp_path)
    assert {key.rpartition(".")[2] for key in left_out} == {"alpha"} and all("lora" in key for key in decayed)
