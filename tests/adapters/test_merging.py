"""What LoRA and its relatives add to the weights, and why other adapters cannot."""

import peft
import pytest
import torch

from hf_xformers.adapters import activate, add_adapter, add_fusion, merge_adapter
from tests.compression.models import batch, tiny
from tests.helpers import close, make_strong


def adapted(config):
    return make_strong(peft.get_peft_model(tiny("ForSequenceClassification"), config), amount=0.2).eval()


IDS = {name: value for name, value in batch().items() if name != "labels"}


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]),
        peft.LoraConfig(r=2, target_modules=["down_proj"], use_dora=True),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["lora", "dora", "ia3"],
)
def test_a_merged_model_is_the_adapted_one(config, tmp_path):
    model = adapted(config)
    with torch.no_grad():
        expected = model(**IDS).logits
        merged = merge_adapter(model)
        close(merged(**IDS).logits, expected, 1e-9)
        close(model(**IDS).logits, expected, 1e-12)  # as it was
        merged.save_pretrained(tmp_path)
        again = type(merged).from_pretrained(tmp_path, dtype=torch.float64)
        close(again(**IDS).logits, expected, 1e-9)
    assert merged.state_dict().keys() == tiny("ForSequenceClassification").state_dict().keys()


@torch.no_grad()
def test_a_merged_weight_by_hand():
    model = adapted(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"]))
    layer = model.get_base_model().model.trunk.layers[1].attention.q_proj
    expected = layer.base_layer.weight + 6 / 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    close(merge_adapter(model).model.trunk.layers[1].attention.q_proj.weight, expected)


def test_what_is_no_change_of_weights_is_refused():
    model = tiny("ForSequenceClassification")
    with pytest.raises(ValueError, match="has no adapter that could be merged"):
        merge_adapter(model)
    for kind, why in (("houlsby", "nonlinearity"), ("pfeiffer", "nonlinearity"), ("k_adapter", "network of its own")):
        add_adapter(model, kind, kind)
        with pytest.raises(ValueError, match=f"kind '{kind}' cannot become a part of the weights.*{why}"):
            merge_adapter(model)
    add_adapter(model, "second", "pfeiffer")
    add_fusion(model, "both", ["pfeiffer", "second"])
    with pytest.raises(ValueError, match="weighs adapters anew"):
        merge_adapter(model)
    activate(model, None)
    with pytest.raises(ValueError, match="has no adapter that could be merged"):
        merge_adapter(model)
    prompt = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PROMPT_TUNING cannot become a part of the weights"):
        merge_adapter(peft.get_peft_model(tiny("ForSequenceClassification"), prompt))
