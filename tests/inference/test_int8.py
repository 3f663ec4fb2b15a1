"""8-bit weights through torchao, from transformers' own configuration: outputs stay near, and a checkpoint loads
again."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from tests.common.cases import CASES
from tests.helpers import aligned, pad, tokens

pytest.importorskip("torchao", reason="int8 is torchao's")

NAMES = ("xf_bert", "xf_longformer", "xf_performer", "xf_linformer", "xf_reformer", "xf_switch_transformer", "xf_luna")
ENCODERS = [case for case in CASES if case.shape == "encoder" and case.name in NAMES]


def recipes():
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    return {"weights": Int8WeightOnlyConfig(), "weights_and_activations": Int8DynamicActivationInt8WeightConfig()}


# What weights become is the same in both recipes. Activations are those of each mechanism, so that this one is tried
# with all of them, and weights alone with the plain one.
RECIPES = [(case, "weights_and_activations") for case in ENCODERS]
RECIPES += [(case, "weights") for case in ENCODERS if case.name == "xf_bert"]


@pytest.mark.parametrize("case, recipe", RECIPES, ids=str)
def test_int8(case, recipe, tmp_path):
    from transformers import TorchAoConfig

    model = case.build(dtype=torch.float32, strong=False)
    model.save_pretrained(tmp_path / "float")
    small = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "float", quantization_config=TorchAoConfig(recipes()[recipe])
    ).eval()
    aligned(small)
    kinds = {name: type(parameter).__name__ for name, parameter in small.named_parameters()}
    quantized = [name for name, kind in kinds.items() if kind != "Parameter"]
    assert any("attention" in name for name in quantized), kinds
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        expected, found = (one(ids, attention_mask=mask).logits[mask.bool()] for one in (model, small))
    if case.exception("half_precision") is None:
        assert (found - expected).abs().mean() < 0.05 * expected.std()
    assert found.isfinite().all() and not torch.equal(found, expected)
    small.save_pretrained(tmp_path / "int8")
    again = aligned(AutoModelForMaskedLM.from_pretrained(tmp_path / "int8").eval())
    with torch.no_grad():
        assert torch.equal(again(ids, attention_mask=mask).logits[mask.bool()], found)
