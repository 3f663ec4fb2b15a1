"""PEFT: which methods work with which task, what is trained, what is saved, and that it loads again."""

import subprocess
import sys

import peft
import pytest
import torch
from peft import (
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.adapters import load_adapter
from hf_xformers.data import load_tokenizer
from hf_xformers.finetuning import add_adapter
from hf_xformers.finetuning.loading import open_config
from hf_xformers.finetuning.peft_methods import BOTTLENECKS
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import BARE, DATA, finetune, predictions, pretrained
from tests.helpers import make_strong, tiny_fields, tokens
from tests.training.runs import SHAPE

HEADS = {
    "text-classification": ("bert", "MaskedLM"),
    "token-classification": ("bert", "MaskedLM"),
    "question-answering": ("bert", "MaskedLM"),
    "multiple-choice": ("bert", "MaskedLM"),
    "translation": ("t5", "Seq2SeqLM"),
    "language-modeling": ("gpt2", "CausalLM"),
}
WORKS = {  # each method with some of its tasks, each task with some method
    "lora": ["token-classification", "question-answering", "multiple-choice"],
    "ia3": ["text-classification", "translation"],
    "prefix": ["translation", "language-modeling"],
    "prompt": ["translation"],  # of texts in test_predict.py
    "houlsby": ["translation"],
    "pfeiffer": ["token-classification", "language-modeling"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders of tiny models with their tokenizers, by variant."""
    root = tmp_path_factory.mktemp("pretrained")
    for variant, head in set(HEADS.values()):
        pretrained(root / variant, variant, f"For{head}", num_hidden_layers=1)
    return root


@pytest.mark.parametrize("method, task", [(method, task) for method, tasks in WORKS.items() for task in tasks])
def test_methods_with_tasks(method, task, places, tmp_path):
    (tmp_path / "data").mkdir()
    variant, _ = HEADS[task]
    base = load_file(places / variant / "model.safetensors")
    extra = ["--peft.num_virtual_tokens", "4"] if method in ("prefix", "prompt") else []
    options = {**BARE, "model": places / variant, "peft": method, "max_steps": 2}
    summary = finetune(task, DATA[task](tmp_path / "data"), tmp_path / "run", *extra, **options)
    assert 0 < summary["trained_parameters"] < summary["parameters"] / 2
    name = "bottleneck" if method in BOTTLENECKS else "adapter_model"
    assert (tmp_path / "run" / f"{name}.safetensors").is_file()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    after = load_file(places / variant / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())


def test_a_result_of_another_kind_does_not_stay(places, tmp_path):
    """Whatever reads the folder would take an adapter that an earlier run has left there."""
    (tmp_path / "data").mkdir()
    data, kinds = DATA["text-classification"](tmp_path / "data"), ("*.safetensors", "*config.json")
    saved = {
        "lora": {"adapter_config.json", "adapter_model.safetensors"},
        None: {"config.json", "model.safetensors"},
        "houlsby": {"bottleneck_config.json", "bottleneck.safetensors"},
    }
    for method in ("lora", None, "houlsby", "lora"):
        options = {**BARE, "model": places / "bert", "peft": method, "max_steps": 1, "overwrite_output_dir": True}
        finetune("text-classification", data, tmp_path / "run", **options)
        found = {path.name for kind in kinds for path in (tmp_path / "run").glob(kind)} - {"tokenizer_config.json"}
        assert found == saved[method]


@pytest.mark.parametrize("variant, head", [("gpt2", "ForCausalLM"), ("t5", "ForSeq2SeqLM")])
def test_generation_reads_a_prefix(variant, head):
    """Each token is the likeliest of a whole pass that reads the learned prefix."""
    kind = {"is_decoder": head == "ForCausalLM", "is_encoder_decoder": head == "ForSeq2SeqLM"}
    torch.manual_seed(0)
    base = make_strong(family(variant)[head](config_class(variant)(**tiny_fields(config_class(variant), **kind))))
    task = {"ForCausalLM": "CAUSAL_LM", "ForSeq2SeqLM": "SEQ_2_SEQ_LM"}[head]
    model = get_peft_model(base, PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).eval()
    ids = tokens(2, 5)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    written = model.generate(**given, **settings)
    assert not torch.equal(written, base.generate(**given, **settings))
    with torch.no_grad():
        if kind["is_decoder"]:
            given = {"input_ids": written, "attention_mask": torch.ones_like(written)}
        else:
            given["decoder_input_ids"] = written
        logits = model(**given).logits[:, -6:-1]
    logits[..., base.config.eos_token_id] = -torch.inf
    assert torch.equal(written[:, -5:], logits.argmax(-1))


@pytest.mark.parametrize("method, width", [("lora", "r"), ("houlsby", "bottleneck")])
def test_an_adapter_loads_onto_its_base_again(method, width, places, tmp_path):
    (tmp_path / "data").mkdir()
    data = DATA["text-classification"](tmp_path / "data")
    options = {"model": places / "bert", "learning_rate": 0.01, "max_steps": 6}
    finetune("text-classification", data, tmp_path / "run", "--peft", method, f"--peft.{width}", "4", **options)
    if method == "lora":
        model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    else:
        model = AutoModelForSequenceClassification.from_pretrained(places / "bert", num_labels=2).eval()
        load_adapter(model, tmp_path / "run")
    with pytest.raises(ValueError, match="holds an adapter alone"):
        open_config(str(tmp_path / "run"))
    tokenizer = load_tokenizer(tmp_path / "run")
    for row in predictions(tmp_path / "run")[:6]:
        with torch.no_grad():
            chances = model(**tokenizer(row["text"], return_tensors="pt")).logits.softmax(-1)[0]
        assert str(int(chances.argmax())) == row["prediction"]
        assert chances.max().item() == pytest.approx(row["probability"], abs=1e-5)


def test_labels_of_an_adapter(places, tmp_path, capsys):
    """The lines that `finetune` ends with load the adapter with its labels, as peft's own class does."""
    (tmp_path / "data").mkdir()
    data = DATA["token-classification"](tmp_path / "data")
    run = tmp_path / "run"
    summary = finetune("token-classification", data, run, peft="lora", model=places / "bert", max_steps=2, **BARE)
    names = summary["labels"]
    said = capsys.readouterr().err.split("loaded onto its base model with\n")[1]
    found = {}
    exec("\n".join(line.strip() for line in said.splitlines() if line.startswith("  ")), found)
    assert len(names) > 2 and list(found["model"].config.id2label.values()) == names
    auto = AutoPeftModelForTokenClassification.from_pretrained(run)
    assert auto.config.id2label == dict(enumerate(names))
    ids = torch.randint(5, 300, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(auto.eval()(ids).logits, found["model"].eval()(ids).logits)


def test_a_fresh_lora_changes_nothing_and_trains_what_it_says():
    torch.manual_seed(0)
    model = family("bert")["ForSequenceClassification"](config_class("bert")(**SHAPE)).eval()
    ids = torch.randint(5, 300, (2, 9))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        adapted = add_adapter(model, "lora", "SequenceClassification", r=4).eval()
        torch.testing.assert_close(adapted(input_ids=ids).logits, before, rtol=0, atol=0)
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    width, layers = SHAPE["hidden_size"], SHAPE["num_hidden_layers"]
    assert sum(size for name, size in trained.items() if "lora_" in name) == 4 * layers * 4 * (width + width)
    assert {name.rpartition("modules_to_save")[0].split(".")[-2] for name in trained if "lora_" not in name} == {
        "classifier"
    }


@pytest.mark.parametrize("given", [["q_proj"], ["all-linear"], [r".*layers\.0.*q_proj"]])
def test_targets_may_be_named_in_three_ways(given):
    model = family("bert")["ForSequenceClassification"](config_class("bert")(**SHAPE))
    adapted = add_adapter(model, "lora", "SequenceClassification", target_modules=given)
    assert any("lora_" in name and "layers.0" in name for name, _ in adapted.named_parameters())


def test_a_recurrent_state_has_no_prefix():
    config = config_class("linear_transformer")(**SHAPE, is_decoder=True)
    model = family("linear_transformer")["ForCausalLM"](config)
    with pytest.raises(ValueError, match="keeps another state; choose lora, ia3 or prompt"):
        add_adapter(model, "prefix", "CausalLM")


def test_peft_knows_every_family_by_itself():
    """peft's own defaults, for whoever imports this package and never runs its command."""
    code = (
        "import sys, hf_xformers; assert 'peft' not in sys.modules; import peft; "
        "from hf_xformers.variants import model_types; from peft.utils import constants as tables; "
        "kinds = [getattr(tables, f'TRANSFORMERS_MODELS_TO_{kind}_TARGET_MODULES_MAPPING') for kind in "
        "('LORA', 'IA3', 'ADALORA', 'OFT', 'LNTUNING')]; "
        "assert all(set(model_types()) <= set(kind) for kind in kinds)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["bert", "luna", "synthesizer", "reformer", "all_attention", "switch_transformer"])
@pytest.mark.parametrize("method", ["LoraConfig", "IA3Config", "LNTuningConfig"])
def test_default_targets_are_there(name, method):
    """Families whose layers lack some of the usual projections included."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = family(name)["ForMaskedLM"](config_class(name)(**sizes, intermediate_size=16, max_position_embeddings=32))
    adapted = peft.get_peft_model(model, getattr(peft, method)())
    assert any(parameter.requires_grad for parameter in adapted.parameters())


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1, "head_dim": 8}])
@pytest.mark.parametrize("head", ["CausalLM", "Seq2SeqLM"])
def test_prefix_tuning_through_peft_alone(head, fields):
    """Given nothing but the number of virtual tokens; a prefix in a shape of its own fails where it meets the keys."""
    config = config_class("xformer")(**{**SHAPE, "num_attention_heads": 4, **fields})
    model, ids = family("xformer")[f"For{head}"](config), torch.randint(5, 60, (2, 6))
    task = {"CausalLM": "CAUSAL_LM", "Seq2SeqLM": "SEQ_2_SEQ_LM"}[head]
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3))
    adapted(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in adapted.parameters() if parameter.requires_grad)


def test_keys_that_say_nothing_are_left_out_of_dicts():
    """`num_key_value_heads=None` is the default; a config made of the dict is the same one."""
    kind = config_class("xformer")
    assert "num_key_value_heads" not in kind().to_dict() and kind(**kind().to_dict()).num_key_value_heads is None
    assert kind(num_key_value_heads=2).to_dict()["num_key_value_heads"] == 2


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "ForTokenClassification"])
def test_an_adapter_without_a_task_loads(head, tmp_path):
    """By peft's Auto class for the task, as trl's users do; a classifier's with its labels."""
    torch.manual_seed(0)
    variant, first = ("gpt2", head) if head == "ForCausalLM" else ("bert", "ForMaskedLM")
    family(variant)[first](config_class(variant)(**SHAPE)).save_pretrained(tmp_path / "base")
    names = {0: "a", 1: "b", 2: "c"}
    more, saved = ({}, None) if head == "ForCausalLM" else ({"id2label": names}, ["classifier", "pooler"])
    model = family(variant)[head].from_pretrained(tmp_path / "base", **more)
    config = LoraConfig(target_modules=["v_proj"], modules_to_save=saved, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = getattr(peft, f"AutoPeftModel{head}").from_pretrained(tmp_path / "adapter").eval()
    ids = tokens(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted(ids).logits)
    assert not saved or loaded.config.id2label == names


def test_prompts_on_a_vocabulary_in_clusters():
    """peft guesses the token table by its size, which no cluster has."""
    fields = {"embedding": {"type": "adaptive", "cutoffs": [8, 16], "factor": 2}, "head": "adaptive"}
    fields["head"] = {"type": "adaptive", "cutoffs": [8, 16], "factor": 2}
    model = XFormerForCausalLM(XFormerConfig(**{**SHAPE, **fields}, is_decoder=True))
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = tokens(2, 5)
    vectors = torch.cat((model.get_prompt(batch_size=2), model.base_model.get_input_embeddings()(ids)), dim=1)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, model.base_model(inputs_embeds=vectors).logits)


def test_prompts_from_words_need_one_table():
    """Of several, none has the vectors that virtual tokens start from."""
    fields = {"embedding": {"type": "adaptive", "cutoffs": [8, 16]}, "tie_word_embeddings": False}
    model = XFormerForCausalLM(XFormerConfig(**{**SHAPE, **fields}, is_decoder=True))
    with pytest.raises(AttributeError, match="leave `prompt_tuning_init` at 'RANDOM'"):
        settings = {"num_virtual_tokens": 3, "prompt_tuning_init": "SAMPLE_VOCAB"}
        get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", **settings))
    with pytest.raises(ValueError, match="cannot be put on XFormerForCausalLM .*'RANDOM'"):
        add_adapter(model, "prompt", "CausalLM", **settings)


def test_prefixes_where_a_layer_differs():
    fields = {"per_layer_config": {1: {"feedforward": "relu"}}, "num_key_value_heads": 2}
    model = XFormerForCausalLM(XFormerConfig(**{**SHAPE, **fields}, is_decoder=True))
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = tokens(2, 5)
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape[:2] == ids.shape


def test_prompts_on_a_table_of_another_width():
    """peft takes the hidden size for that of token vectors, unless it is told theirs; the command tells it."""
    model = family("albert")["ForCausalLM"](config_class("albert")(**SHAPE, is_decoder=True))
    assert model.get_input_embeddings().embedding_dim != model.config.hidden_size
    model = add_adapter(model, "prompt", "CausalLM", num_virtual_tokens=3)
    ids = tokens(2, 5)
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape[:2] == (2, 8)


def test_a_prefix_under_checkpointing_is_refused():
    """Where it would be left out, and nothing would learn."""
    model = family("gpt2")["ForCausalLM"](config_class("gpt2")(**SHAPE))
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).train()
    model.base_model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\)"):
        model(input_ids=tokens(2, 5))
