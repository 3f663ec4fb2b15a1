"""Sources that cannot convert: one paragraph and exit code 2, nothing written, nothing damaged, no code run."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from hf_xformers.cli import main
from hf_xformers.conversion import (
    convert_checkpoint,
    from_transformers,
    swap_checkpoint,
    swap_components,
    to_transformers,
)
from tests.conversion.test_checkpoints import files

NAME = "bert.encoder.layer.1.intermediate.dense.weight"


@pytest.fixture(autouse=True, scope="module")
def no_bars():
    """As in a process whose standard error is no terminal from the start."""
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if before:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved BERT of two layers."""
    folder = tmp_path_factory.mktemp("source") / "bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(saved, tmp_path / "bert")


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def in_shards(folder, suffix):
    """The weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    parts = {key: f"{stem}-0000{1 + index % 2}-of-00002.{suffix}" for index, key in enumerate(tensors)}
    for name in set(parts.values()):
        part = {key: tensor for key, tensor in tensors.items() if parts[key] == name}
        if suffix == "safetensors":
            save_file(part, folder / name, metadata={"format": "pt"})
        else:
            torch.save(part, folder / name)
    index = {"metadata": {}, "weight_map": parts}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


# ------------------------------------------------------------------------------- what is refused, and how


EDITED = {  # name -> (fields of config.json, what the paragraph says)
    "wider config": (
        {"hidden_size": 32},
        r"other sizes .*'bert.embeddings.\w+.weight' \[\d+, 16\] instead of \[\d+, 32\]",
    ),
    "larger vocabulary": (
        {"vocab_size": 61},
        r"other sizes .*'bert.embeddings.word_embeddings.weight' \[60, 16\] instead of \[61, 16\]",
    ),
    "deeper config": ({"num_hidden_layers": 3}, "lacks 'bert.encoder.layer.2."),
    "shallower config": ({"num_hidden_layers": 1}, "no place for: 'bert.encoder.layer.1."),
    "heads that do not divide": ({"num_attention_heads": 3}, "num_attention_heads|multiple of"),
    "width of letters": ({"hidden_size": "wide"}, "config.json.*hidden_size"),
    "layers of none": ({"num_hidden_layers": -2}, "config.json.*num_hidden_layers|num_hidden_layers"),
    "model type of a list": ({"model_type": ["bert"]}, r"model type \['bert'\]"),
    "nearly a known type": ({"model_type": "bert2"}, "model type 'bert2'; did you mean 'bert'"),
    "unknown class": ({"architectures": ["BertForPoetry"]}, "BertForPoetry has no counterpart"),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quantized \(gptq\); .*full precision",
    ),
    "quantized, unnamed": (
        {"quantization_config": {"load_in_8bit": True}},
        r"quantized \(load_in_8bit\); .*full precision",
    ),
}
WRITTEN = {  # name -> (a file, its new content, what the paragraph says)
    "empty weights": ("model.safetensors", "", "model.safetensors is cut off"),
    "pointer to large files": (
        "model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "model.safetensors",
    ),
    # transformers would read the weights of the adapter's base instead of those of the folder
    "adapter beside a model": (
        "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "x/y"}',
        "is a PEFT adapter.*merge_and_unload",
    ),
    "config of a list": ("config.json", "[1, 2]", "config.json' holds a list"),
    "config of nothing": ("config.json", "{}", "names no model_type, as transformers does"),
    "damaged tokenizer": ("tokenizer.json", "{broken", "The tokenizer of .* cannot be read"),
}  # fmt: skip
RENAMED = {  # name -> (what the weights are called, whether config.json stays, what the paragraph says)
    "weights of tensorflow": ("tf_model.h5", True, "holds tf_model.h5.*TensorFlow.*safetensors"),
    "gguf alone": ("model-q4.gguf", False, "GGUF"),
    "gguf with a config": ("model-q4.gguf", True, "GGUF"),
}
REFUSED = {}  # name -> (what damages the folder, what the paragraph says)


def rename(folder, name, keep_config):
    (folder / "model.safetensors").rename(folder / name)
    if not keep_config:
        (folder / "config.json").unlink()


def edit_unread(folder, fields):
    """The weights of a quantized model are never read."""
    edit(folder, **fields)
    if "quantization_config" in fields:
        (folder / "model.safetensors").write_bytes(b"never read")


for _name, (_fields, _message) in EDITED.items():
    REFUSED[_name] = (lambda folder, fields=_fields: edit_unread(folder, fields), _message)
for _name, (_file, _text, _message) in WRITTEN.items():
    REFUSED[_name] = (lambda folder, file=_file, text=_text: (folder / file).write_text(text), _message)
for _name, (_file, _keep, _message) in RENAMED.items():
    REFUSED[_name] = (lambda folder, file=_file, keep=_keep: rename(folder, file, keep), _message)


def refused(message):
    def enter(damage):
        REFUSED[damage.__name__] = (damage, message)
        return damage

    return enter


def cut_off(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def code_of_its_own(folder):
    (folder / "code.py").write_text("import os\nos.environ['HF_XFORMERS_RAN'] = 'yes'\n")


@refused(f"lacks '{NAME}'; copy or download it again")
def missing_tensor(folder):
    rewrite(folder, lambda tensors: {key: tensors[key] for key in tensors if key != NAME})


@refused("no place for: 'bert.extra.weight'")
def unexpected_tensor(folder):
    rewrite(folder, lambda tensors: {**tensors, "bert.extra.weight": torch.ones(2)})


@refused("NaN|finite")
def weights_of_nan(folder):
    rewrite(folder, lambda tensors: {**tensors, NAME: tensors[NAME] * float("nan")})


@refused(f"'{NAME}' in .* is quantized .*I8")
def weights_of_whole_numbers(folder):
    rewrite(folder, lambda tensors: {**tensors, NAME: torch.ones_like(tensors[NAME], dtype=torch.int8)})


@refused("model type 'my_own'.*code of its own.*never run")
def code_for_an_unknown_type(folder):
    edit(folder, model_type="my_own", auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"})
    code_of_its_own(folder)


@refused("tokenizer.*code of its own.*never run")
def code_for_a_tokenizer(folder):
    fields = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    code_of_its_own(folder)


@refused("model.safetensors is cut off")
def truncated(folder):
    cut_off(folder / "model.safetensors", 100)


@refused("config.json' is no valid JSON")
def config_cut_off(folder):
    cut_off(folder / "config.json", 30)


@refused("it has no model-00002-of-00002.safetensors")
def shard_missing(folder):
    in_shards(folder, "safetensors")
    (folder / "model-00002-of-00002.safetensors").unlink()


@refused("it has no pytorch_model-00001-of-00002.bin")
def pickled_shard_missing(folder):
    in_shards(folder, "bin")
    (folder / "pytorch_model-00001-of-00002.bin").unlink()


@refused("model.safetensors.index.json is cut off or no index")
def index_cut_off(folder):
    in_shards(folder, "safetensors")
    cut_off(folder / "model.safetensors.index.json", 20)


@refused("lacks '")
def index_that_lacks_a_tensor(folder):
    in_shards(folder, "safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = folder / index["weight_map"].pop(NAME)
    path.write_text(json.dumps(index))
    save_file({key: tensor for key, tensor in load_file(shard).items() if key != NAME}, shard)


@refused("pytorch_model.bin' cannot be read")
def truncated_pickle(folder):
    pickled(folder)
    cut_off(folder / "pytorch_model.bin", 300)


@refused("has no weights.*model.safetensors")
def no_weights(folder):
    (folder / "model.safetensors").unlink()


@refused("is a PEFT adapter .*'some/base'.*merge_and_unload")
def adapter(folder):
    rename(folder, "adapter_model.safetensors", keep_config=False)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))


SWAPPED = (  # some of each stage: the place, config.json, the tokenizer, files of weights, tensors
    *("gguf alone", "adapter", "model type of a list", "quantized", "width of letters", "code_for_an_unknown_type"),
    *("damaged tokenizer", "code_for_a_tokenizer", "no_weights", "truncated", "shard_missing", "truncated_pickle"),
    *("wider config", "missing_tensor", "weights_of_nan"),
)


@pytest.mark.parametrize(("case", "swap"), [*((case, False) for case in REFUSED), *((case, True) for case in SWAPPED)])
def test_one_paragraph_and_nothing_written(folder, tmp_path, capfd, monkeypatch, case, swap):
    monkeypatch.delenv("HF_XFORMERS_RAN", raising=False)
    damage, message = REFUSED[case]
    damage(folder)
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept.txt").write_text("kept")
    before = files(tmp_path)
    asked = ["--attention", "talking_heads"] if swap else []
    capfd.readouterr()
    code = main(["convert", "--from", str(folder), "--to", str(target), "--overwrite", *asked])
    said = capfd.readouterr().err.strip()
    assert code == 2, said
    assert len(said.splitlines()) == 1 and said.startswith("hf-xformers: error: "), said
    assert "--debug" not in said
    assert re.search(message, said), said
    assert files(tmp_path) == before
    assert "HF_XFORMERS_RAN" not in os.environ

    open_it = (
        (lambda: swap_components(folder, attention="talking_heads", measure=False))
        if swap
        else (lambda: from_transformers(folder))
    )
    if "tokenizer" not in case:
        with pytest.raises(ValueError, match=message) as caught:
            open_it()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model-q4.gguf", "model.safetensors", "nowhere"])
def test_paths_that_are_no_folder(folder, tmp_path, capfd, name):
    if name == "model-q4.gguf":
        (folder / name).write_bytes(b"GGUF")
    assert main(["convert", "--from", str(folder / name), "--to", str(tmp_path / "target")]) == 2
    said = capfd.readouterr().err
    assert {"model-q4.gguf": "is a GGUF file", "model.safetensors": "is a file; give the folder"}.get(
        name, "There is no folder"
    ) in said
    assert not (tmp_path / "target").exists()


def test_a_target_around_the_source_is_not_replaced(folder, tmp_path, capfd):
    outer = tmp_path / "outer"
    outer.mkdir()
    shutil.move(folder, outer / "bert")
    before = files(tmp_path)
    for swap in ([], ["--attention", "talking_heads"]):
        code = main(["convert", "--from", str(outer / "bert"), "--to", str(outer), "--overwrite", *swap])
        assert code == 2 and "lies in the target" in capfd.readouterr().err
    assert files(tmp_path) == before


def test_loaded_models_with_quantized_weights(folder):
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ValueError, match="BertForMaskedLM is quantized \\(torchao\\); .*full precision"):
        from_transformers(model)
    with pytest.raises(ValueError, match="BertForMaskedLM is quantized"):
        swap_components(model, attention="talking_heads", measure=False)
    model.config.quantization_config = None
    ours = from_transformers(model)
    ours.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ValueError, match="XFBertForMaskedLM is quantized"):
        swap_components(ours, attention="talking_heads", measure=False)


def test_loaded_models_with_adapters(folder):
    peft = pytest.importorskip("peft")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    ours = from_transformers(model)
    for loaded, target, change in (
        (model, "query", from_transformers),
        (ours, "q_proj", to_transformers),
        (ours, "q_proj", lambda given: swap_components(given, max_length=30, measure=False)),
    ):
        adapted = peft.get_peft_model(loaded, peft.LoraConfig(target_modules=[target]))
        with pytest.raises(ValueError, match=f"has a PEFT adapter in .*{target}'; merge it first"):
            change(loaded)
        assert change(adapted.merge_and_unload()) is not None


def test_loaded_models_whose_weights_are_elsewhere(folder):
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    ours = from_transformers(model).to("meta")
    for change in (to_transformers, lambda given: swap_components(given, max_length=30)):
        with pytest.raises(ValueError, match="of XFBertForMaskedLM is not in memory.* give the folder or Hub id"):
            change(ours)
    with pytest.raises(ValueError, match="of BertForMaskedLM is not in memory"):
        from_transformers(model.to("meta"))


# ------------------------------------------------------------------------------- what is taken all the same


def test_code_beside_a_known_type_is_not_run(folder, tmp_path, monkeypatch):
    """The class of the libraries is used."""
    monkeypatch.delenv("HF_XFORMERS_RAN", raising=False)
    edit(folder, auto_map={"AutoConfig": "code.Config", "AutoModelForMaskedLM": "code.Model"})
    code_of_its_own(folder)
    assert convert_checkpoint(folder, tmp_path / "ours").complete
    swap_checkpoint(folder, tmp_path / "swapped", attention="talking_heads", measure=False)
    assert "HF_XFORMERS_RAN" not in os.environ
    assert not list((tmp_path / "ours").glob("*.py"))


def test_a_source_without_tokenizer_says_so(folder, tmp_path, capfd):
    assert main(["convert", "--from", str(folder), "--to", str(tmp_path / "ours")]) == 0
    assert "the source has no tokenizer" in capfd.readouterr().err
