"""A sentence-transformers folder converts and swaps as a whole: its modules, prompts and length."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hf_xformers.conversion import convert_checkpoint, swap_checkpoint
from hf_xformers.hub.bundle import bundle
from hf_xformers.hub.checkpoint_files import checkpoint_files
from tests.conversion.test_checkpoints import WORD_PIECES

WIDTH, LENGTH = 16, 9
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
TEXTS = ["a b c d e f g h i j k l m n o p q r s", "t s r", "b"]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def encoder(tmp_path):
    """A folder as the Hub has them: `architectures` names a head that the weights lack."""
    folder = tmp_path / "encoder"
    torch.manual_seed(0)
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(vocab_size=len(WORD_PIECES), max_position_embeddings=24, **sizes)
    model = transformers.BertModel(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**said, "architectures": ["BertForMaskedLM"]})
    transformers.BertTokenizer(vocab={piece: index for index, piece in enumerate(WORD_PIECES)}).save_pretrained(folder)
    names = {kind: f"{index}_{kind}" if kind in KINDS[1:3] else "" for index, kind in enumerate(KINDS)}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(names.items())
    ]
    write(folder / "modules.json", modules)
    write(folder / "sentence_bert_config.json", {"max_seq_length": LENGTH, "do_lower_case": False})
    prompts = {"prompts": {"query": "q r s t"}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write(folder / "config_sentence_transformers.json", prompts)
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write(folder / "1_Pooling" / "config.json", pooling)
    dense = {"in_features": WIDTH, "out_features": 5, "bias": True}
    write(folder / "2_Dense" / "config.json", {**dense, "activation_function": "torch.nn.modules.activation.Tanh"})
    tensors = {"linear.weight": torch.randn(5, WIDTH), "linear.bias": torch.randn(5)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


def beside(folder):
    """What is not the model's own."""
    names = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    paths = [*(folder / name for name in names), *(path for path in folder.glob("[0-9]_*/*"))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def settings(folder):
    return json.loads((folder / "sentence_bert_config.json").read_text())


def test_there_and_back(encoder, tmp_path):
    report = convert_checkpoint(encoder, tmp_path / "ours")
    assert report.target == "XFBertModel" and not report.new
    convert_checkpoint(tmp_path / "ours", tmp_path / "back")
    for folder in (tmp_path / "ours", tmp_path / "back"):
        found = beside(folder)
        assert json.loads(found.pop("modules.json")) == json.loads((encoder / "modules.json").read_text())
        assert found == {name: content for name, content in beside(encoder).items() if name != "modules.json"}
    assert beside(encoder).keys() <= checkpoint_files(tmp_path / "ours").keys()  # what is shared
    assert beside(bundle(tmp_path / "ours", tmp_path / "bundle")) == beside(tmp_path / "ours")


def test_length_of_a_swap(encoder, tmp_path):
    """As many tokens as before, or as many as are asked for."""
    swap_checkpoint(encoder, tmp_path / "same", attention={"type": "longformer", "attention_window": 8}, measure=False)
    assert settings(tmp_path / "same") == settings(encoder)
    swap_checkpoint(encoder, tmp_path / "long", max_length=48, measure=False)
    assert settings(tmp_path / "long") == {"max_seq_length": 48, "do_lower_case": False}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "long").model_max_length == 48


@pytest.mark.parametrize(("before", "length", "after"), [(9, None, 9), (1000, None, 24), (9, 48, 48)])
def test_length_of_a_tokenizer(before, length, after, encoder, tmp_path):
    """What newer releases keep the length in."""
    path = encoder / "tokenizer_config.json"
    write(path, {**json.loads(path.read_text()), "model_max_length": before})
    swap_checkpoint(encoder, tmp_path / "new", residual="pre_ln", max_length=length, measure=False)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new").model_max_length == after


def test_model_in_a_folder_within(encoder, tmp_path):
    """The layout of early releases becomes today's."""
    old, inner = tmp_path / "old", tmp_path / "old" / "0_Transformer"
    shutil.copytree(encoder, inner)
    for name in ("1_Pooling", "2_Dense", "modules.json", "config_sentence_transformers.json"):
        shutil.move(inner / name, old / name)
    modules = json.loads((old / "modules.json").read_text())
    write(old / "modules.json", [{**modules[0], "path": "0_Transformer"}, *modules[1:]])
    convert_checkpoint(old, tmp_path / "ours")
    swap_checkpoint(old, tmp_path / "new", attention="longformer", measure=False)
    for folder in (tmp_path / "ours", tmp_path / "new"):
        assert json.loads(beside(folder)["modules.json"]) == modules and settings(folder) == settings(encoder)


def test_other_modules(encoder, tmp_path):
    """A model of token scores keeps its head; code of a repository is never run; damage is said."""
    modules = json.loads((encoder / "modules.json").read_text())
    write(encoder / "sentence_bert_config.json", {"transformer_task": "fill-mask"})
    assert convert_checkpoint(encoder, tmp_path / "scores").target == "XFBertForMaskedLM"
    write(encoder / "modules.json", [{**modules[0], "type": "custom_st.Transformer"}, *modules[1:]])
    report = convert_checkpoint(encoder, tmp_path / "custom")
    assert any("'custom_st.Transformer' is code of its own" in note for note in report.notes)
    assert not (tmp_path / "custom" / "modules.json").exists()
    for damaged in ([{**modules[0], "path": "../elsewhere"}], [], {"type": 1}):
        write(encoder / "modules.json", damaged)
        with pytest.raises(ValueError, match="no list of sentence-transformers' modules"):
            convert_checkpoint(encoder, tmp_path / "damaged")


def test_vectors_of_sentence_transformers(encoder, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    window = {"type": "longformer", "attention_window": 24}
    convert_checkpoint(encoder, tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "back")
    swap_checkpoint(encoder, tmp_path / "new", attention=window, measure=False)

    def vectors(folder):
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        assert [type(module).__name__ for module in model] == [*KINDS] and model.max_seq_length == LENGTH
        plain = model.encode(TEXTS, convert_to_tensor=True)
        return torch.cat([plain, model.encode(TEXTS, prompt_name="query", convert_to_tensor=True)])

    before = vectors(encoder)
    assert before.shape == (6, 5)
    for folder in ("ours", "back", "new"):
        torch.testing.assert_close(vectors(tmp_path / folder), before, atol=1e-5, rtol=1e-5)
