"""Weights of 4 bits through bitsandbytes, and adapters on them (QLoRA): outputs are those of dequantized weights."""

import peft
import pytest
import torch
from transformers import BitsAndBytesConfig

from tests.common.cases import CASES
from tests.helpers import tokens

bitsandbytes = pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes'")

BY_NAME = {str(case): case for case in CASES}
NAMES = [  # by what they do with their projections: call them, fold or absorb their weights, project tables, ...
    *("xf_bert-encoder", "xf_linear_transformer-encoder", "xf_multi_head_latent_attention-decoder", "xf_t5-seq2seq"),
    *("xf_transformer_xl-decoder", "xf_funnel_transformer-encoder", "xf_reformer-decoder", "xf_longformer-decoder"),
]


@pytest.mark.parametrize("name", NAMES)
def test_adapters_on_4_bits(name, tmp_path):
    case, ids = BY_NAME[name], tokens(2, 7)
    model = case.build(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    small = type(model).from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32).eval()
    packed = {key: part for key, part in small.named_modules() if isinstance(part, bitsandbytes.nn.Linear4bit)}
    assert any(".attention." in key for key in packed)
    with torch.no_grad():
        for key, part in packed.items():
            weight = bitsandbytes.functional.dequantize_4bit(part.weight.data, part.weight.quant_state)
            model.get_submodule(key).weight.copy_(weight)
        expected = case.run(model, ids)
        torch.testing.assert_close(case.run(small, ids), expected, rtol=1e-4, atol=1e-4)
    small = peft.prepare_model_for_kbit_training(small, use_gradient_checkpointing=False)
    options = {"target_modules": "all-linear", "r": 2, "init_lora_weights": False}
    adapted = peft.get_peft_model(small, peft.LoraConfig(**options)).train()
    case.run(adapted, ids).square().sum().backward()
    idle = [key for key, p in adapted.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not idle
