"""peft's adapters on mechanisms of every kind: what they reach, that each has an effect, and that merging keeps it."""

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForTokenClassification

from hf_xformers._registration import PROJECTIONS
from hf_xformers.attention.shared.base import Attention
from hf_xformers.finetuning.peft_methods import reach, targets
from hf_xformers.variants import config_class, family
from tests.common.cases import CASES
from tests.helpers import close, make_strong, tiny_fields, tokens

BY_NAME = {str(case): case for case in CASES}
DECIDES = ("query_gate", "inner", "outer", "film", "embed", "score", "sort_in", "sort_out", "inputs")  # what is read
BY_NETWORK = ("gate_proj", "up_proj", "down_proj")


def names(module):
    return {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}


@pytest.mark.parametrize("case", [case for case in CASES if case.shape == "decoder"], ids=str)
def test_default_targets_are_all_projections_of_a_mechanism(case):
    with torch.device("meta"):
        model = case.family[case.head](case.config())
    found = targets(model, "lora", None)
    for module in model.modules():
        if isinstance(module, Attention):
            inside = {name.rpartition(".")[2] for name in names(module)}
            left = inside - set(found) - set(DECIDES)
            assert left <= set(BY_NETWORK) and (not left or inside & {"q_proj", "v_proj"}), left
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[model.config.model_type]
    assert set(found) & set(PROJECTIONS) <= set(known)
    if not set(found) & set(PROJECTIONS):
        assert set(found) <= set(known)


def adapted(case, **options):
    """(its model in float64, the same with strong adapters)"""
    model = case.build()
    options = {"target_modules": "all-linear", "r": 2, **options}
    result = peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False).double().eval()
    torch.manual_seed(3)
    for name, parameter in result.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model, result


@pytest.mark.parametrize(
    "name", ["xf_floater-decoder", "xf_indigo-decoder", "adaptive_vocabulary-decoder", "adaptive_vocabulary-encoder"]
)
def test_every_adapter_takes_part_and_merging_keeps_it(name):
    case, ids = BY_NAME[name], tokens(2, 7)
    with torch.no_grad():
        before = case.run(case.build(), ids)
    _, changed = adapted(case)
    logits = changed(input_ids=ids).logits
    logits.square().sum().backward()
    idle = [key for key, p in changed.named_parameters() if "lora_" in key and (p.grad is None or not p.grad.any())]
    assert not idle
    with torch.no_grad():
        assert (logits - before).abs().max() > 1e-3
        close(changed(input_ids=ids).logits, logits.detach())  # what is kept between calls is not that of the base
        with changed.disable_adapter():
            close(changed(input_ids=ids).logits, before)
        close(changed(input_ids=ids).logits, logits.detach())
        close(changed.merge_and_unload()(input_ids=ids).logits, logits.detach())


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *(
            ("LNTuningConfig", name)
            for name in ("xf_t5-seq2seq", "xf_complex_order-encoder", "task_conditioned-decoder")
        ),
        ("IA3Config", "xf_linformer-encoder"),  # whose bias is added apart, in another amount
    ],
)
@torch.no_grad()
def test_factors_and_norms_act_as_when_they_are_merged(method, name):
    case, ids = BY_NAME[name], tokens(2, 7)
    changed = peft.get_peft_model(case.build(), getattr(peft, method)()).double().eval()
    before = case.run(changed, ids)
    torch.manual_seed(3)
    for parameter in changed.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    after = case.run(changed, ids)
    assert (after - before).abs().max() > 1e-3
    close(case.run(changed.merge_and_unload(), ids), after)


def test_adapters_inside_a_differential_equation_have_an_effect():
    case, ids = BY_NAME["xf_floater-decoder"], tokens(2, 7)
    with torch.no_grad():
        before = case.run(case.build(), ids)
        _, changed = adapted(case, target_modules=["first", "second"])
        after = changed(input_ids=ids).logits
        assert (after - before).abs().max() > 1e-3
        close(changed.merge_and_unload()(input_ids=ids).logits, after)


def test_tables_that_are_tied_are_refused_by_name():
    case = BY_NAME["adaptive_vocabulary-decoder"]
    with pytest.raises(ValueError, match="TiedLinear"):
        adapted(case, target_modules=["lm_head.tables.0"])


@pytest.mark.parametrize("name", ["gpt2", "average_attention", "r_transformer"])
def test_reach(name):
    kind = config_class(name)
    model = family(name)["ForCausalLM"](kind(**tiny_fields(kind, "decoder")))
    changed = peft.get_peft_model(model, peft.LoraConfig())
    found, layers = reach(changed), model.config.num_hidden_layers
    adapters = [part for part in changed.modules() if isinstance(part, BaseTunerLayer)]
    assert (found["layers"], found["adapted_layers"], found["adapted_maps"]) == (layers, layers, len(adapters))
    if name == "gpt2":
        assert (found["adapted_maps"], found["maps"]) == (4 * layers, 6 * layers)


@pytest.mark.parametrize("name", ["xformer", "forgetting_transformer"])
def test_an_adapter_is_told_its_task(name):
    """Also where `For` begins another word of the class's name."""
    kind = config_class(name)
    model = family(name)["ForSequenceClassification"](kind(**tiny_fields(kind)))
    assert peft.get_peft_model(model, peft.LoraConfig()).peft_config["default"].task_type == "SEQ_CLS"


def saved(tmp_path, head, labels=None, **options):
    """Folders of a base without that head's layer and of a strong adapter, and the adapted model."""
    kind, members = config_class("bert"), family("bert")
    torch.manual_seed(0)
    make_strong(members["ForMaskedLM"](kind(**tiny_fields(kind)))).save_pretrained(tmp_path / "base")
    model = members[head].from_pretrained(tmp_path / "base", **labels or {})
    changed = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    for name, parameter in changed.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    changed.save_pretrained(tmp_path / "adapter")
    return changed


def test_an_adapter_without_a_task_finds_its_class(tmp_path):
    changed, ids = saved(tmp_path, "ForMaskedLM"), tokens(2, 7)
    loaded = peft.AutoPeftModel.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(input_ids=ids).logits, changed(input_ids=ids).logits, 1e-6)


@pytest.mark.parametrize("way", ["peft", "transformers"])
def test_an_adapter_brings_its_labels(way, tmp_path):
    labels = {index: f"label {index}" for index in range(5)}
    changed = saved(tmp_path, "ForTokenClassification", {"id2label": labels}, task_type="TOKEN_CLS")
    kind = {"peft": peft.AutoPeftModelForTokenClassification, "transformers": AutoModelForTokenClassification}[way]
    loaded, ids = kind.from_pretrained(tmp_path / "adapter").eval(), tokens(2, 7)
    assert loaded.config.id2label == labels and loaded.config.label2id["label 3"] == 3
    with torch.no_grad():
        close(loaded(input_ids=ids).logits, changed(input_ids=ids).logits, 1e-6)


@pytest.mark.parametrize(
    "name, remedy", [("xf_delight", "token_dim=16"), ("differing_layers", "choose LoRA"), ("xf_synthesizer", "choose")]
)
def test_a_prefix_of_other_sizes_is_refused(name, remedy):
    model = BY_NAME[f"{name}-decoder"].build(dtype=torch.float32)
    changed = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=f"keys of 4 heads of width 8, .*{remedy}"):
        changed(input_ids=tokens(2, 7))


@pytest.mark.parametrize("name", ["shared_experts-decoder", "xf_switch_transformer-seq2seq", "xf_hash_layers-decoder"])
def test_tensors_of_experts_are_adapted(name):
    case, ids = BY_NAME[name], tokens(2, 7)
    before = case.run(case.build(), ids)
    places = [f"experts.{which}_proj" for which in ("up", "gate_up", "down")]
    _, changed = adapted(case, target_modules=[], target_parameters=places)
    logits = case.run(changed, ids)
    logits.square().sum().backward()
    assert all(p.grad.any() for key, p in changed.named_parameters() if "lora_B" in key)
    with torch.no_grad():
        assert (logits - before).abs().max() > 1e-3
        close(case.run(changed.merge_and_unload(), ids), logits.detach())


@pytest.mark.parametrize("name", ["xf_bart-decoder", "xf_scale_norm-decoder", "xf_span_bert-encoder"])
@torch.no_grad()
def test_trainable_tokens_of_a_tied_head(name):
    """Also where that has a bias, and where its weight is read without a call."""
    case, ids = BY_NAME[name], tokens(2, 7)
    before = case.run(case.build(), ids)
    config = peft.LoraConfig(r=2, trainable_token_indices=[int(ids[0, 1])])
    changed = peft.get_peft_model(case.build(), config, autocast_adapter_dtype=False).double().eval()
    close(case.run(changed, ids), before)
    for key, parameter in changed.named_parameters():
        if "trainable_tokens" in key:
            parameter.add_(0.3)
    after = case.run(changed, ids)
    assert (after - before).abs().max() > 1e-3
    close(case.run(changed.merge_and_unload(), ids), after)


@pytest.mark.parametrize(
    "name, table",
    [
        ("xf_hibert-encoder", "sentence_table"),
        ("xf_deberta-encoder", "position.table"),
        ("xf_ernie_doc-decoder", "relative.distances"),
        ("xf_evolved_transformer-encoder", "branches.conv"),
    ],
)
@torch.no_grad()
def test_tables_and_convolutions_are_adapted(name, table):
    case, ids = BY_NAME[name], tokens(2, 7)
    before = case.run(case.build(), ids)
    _, changed = adapted(case, target_modules=[table])
    after = case.run(changed, ids)
    assert (after - before).abs().max() > 1e-3
    close(case.run(changed.merge_and_unload(), ids), after)


def test_an_adapter_that_nobody_would_read_is_refused():
    case = BY_NAME["xf_scale_norm-decoder"]
    _, changed = adapted(case, target_modules=["lm_head.decoder"])
    with pytest.raises(ValueError, match="on this Linear has no effect"):
        case.run(changed, tokens(2, 7))


@torch.no_grad()
def test_an_adapted_bias_of_a_recurrence():
    case, ids = BY_NAME["xf_r_transformer-encoder"], tokens(2, 7)
    _, changed = adapted(case, target_modules=["state_proj"], lora_bias=True)
    after = case.run(changed, ids)
    close(case.run(changed.merge_and_unload(), ids), after)


def test_what_a_checkpoint_lacks_is_named(tmp_path, caplog):
    for saved_modules, said in ((None, True), (["pooler"], False)):
        caplog.clear()
        changed = saved(tmp_path, "ForSequenceClassification", task_type="SEQ_CLS", modules_to_save=saved_modules)
        assert ("`modules_to_save=['pooler']`" in caplog.text) is said
    ids = tokens(2, 7)
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(input_ids=ids).logits, changed(input_ids=ids).logits, 1e-6)


def test_an_adapter_on_the_classifier_itself_loads(tmp_path):
    """It has no task of peft's, under which the classifier would be trained in whole."""
    kind, head = config_class("bert"), family("bert")["ForTokenClassification"]
    head(kind(**tiny_fields(kind))).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    changed = peft.get_peft_model(head.from_pretrained(tmp_path / "base"), config).eval()
    changed.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(head.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(input_ids=tokens(2, 7)).logits, changed(input_ids=tokens(2, 7)).logits, 1e-6)


@pytest.mark.parametrize("name", ["xf_gpt2-decoder", "xf_longformer-encoder"])
def test_names_to_save_that_no_module_has_are_told(name, caplog):
    names = ["embed_tokens", "lm_head"]  # as in Llama
    peft.get_peft_model(BY_NAME[name].build(), peft.LoraConfig(modules_to_save=names))
    assert "has ['embed_tokens'], which no module" in caplog.text and "'embedding.tokens'" in caplog.text
    caplog.clear()
    changed = peft.get_peft_model(BY_NAME[name].build(), peft.LoraConfig(modules_to_save=["embedding.tokens"]))
    assert changed.get_input_embeddings().weight.requires_grad and not caplog.text


@pytest.mark.parametrize("name, part", [("xf_floater", "dynamics"), ("xf_product_key_memory", "query_norm")])
@torch.no_grad()
def test_a_part_that_is_trained_in_whole(name, part):
    case, ids = BY_NAME[f"{name}-encoder"], tokens(2, 7)
    model = case.build()
    before = case.run(model, ids)
    changed = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=[part])).double().eval()
    close(case.run(changed, ids), before)
    for key, parameter in changed.named_parameters():
        if "modules_to_save" in key:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    assert (case.run(changed, ids) - before).abs().max() > 1e-3
    with changed.disable_adapter():
        close(case.run(changed, ids), before)


def test_names_to_save_of_a_module_and_a_part_of_it_are_refused():
    """peft would save both and load neither."""
    case = BY_NAME["xf_complex_order-encoder"]
    with pytest.raises(ValueError, match="write 'attention_residual.norm'"):
        peft.get_peft_model(case.build(), peft.LoraConfig(modules_to_save=["norm"]))
    peft.get_peft_model(case.build(), peft.LoraConfig(modules_to_save=["attention_residual.norm"]))


def test_other_methods_know_a_family_without_queries():
    changed = peft.get_peft_model(BY_NAME["xf_average_attention-decoder"].build(), peft.LoHaConfig())
    assert changed.targeted_module_names


@pytest.mark.parametrize("names", [None, "all-linear"])
def test_an_adapter_brings_its_layer_of_answers(names, tmp_path):
    changed = saved(tmp_path, "ForQuestionAnswering", task_type="QUESTION_ANS", target_modules=names)
    assert any(p.requires_grad for key, p in changed.named_parameters() if "classifier.modules_to_save" in key)
    ids = tokens(2, 7)
    loaded = peft.AutoPeftModelForQuestionAnswering.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(input_ids=ids).end_logits, changed(input_ids=ids).end_logits, 1e-6)


def test_distances_are_no_rows_of_a_mixed_batch():
    """Also where there are as many."""
    _, changed = adapted(BY_NAME["xf_ernie_doc-decoder"], target_modules=["r_proj"])
    with pytest.raises(ValueError, match="`adapter_names` should be the same"):
        changed(input_ids=tokens(3, 3), adapter_names=["default", "__base__", "default"])
