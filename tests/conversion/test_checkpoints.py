"""Folders: complete conversions with tokenizer and generation settings, and failures that leave nothing behind."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import hf_xformers
from hf_xformers.conversion import checkpoint, convert_checkpoint, from_transformers, to_transformers
from hf_xformers.conversion.swap import swap_checkpoint, swap_components
from tests.conversion.architectures import tiny

LETTERS = [chr(ord("a") + index) for index in range(20)]
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]


@pytest.fixture
def bert(tmp_path):
    """A saved BERT with its tokenizer; (folder, model)."""
    folder = tmp_path / "bert"
    model = tiny("BertForMaskedLM").make(output_hidden_states=True)
    model.save_pretrained(folder)
    tokenizer = transformers.BertTokenizer(vocab={piece: index for index, piece in enumerate(WORD_PIECES)})
    tokenizer.save_pretrained(folder)
    return folder, model


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_and_back(tmp_path, bert):
    folder, model = bert
    report = convert_checkpoint(folder, tmp_path / "ours")
    assert report.complete and not report.notes
    assert (report.source, report.target) == ("BertForMaskedLM", "XFBertForMaskedLM")
    assert ("bert.embeddings.LayerNorm.bias", "model.trunk.embedding.norm.bias") in report.mapped
    ours = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert type(ours) is hf_xformers.XFBertForMaskedLM and ours.config.output_hidden_states
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert type(tokenizer) is transformers.BertTokenizer
    batch = tokenizer(["abc d", "e"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist()[1][:3] == [2, WORD_PIECES.index("e"), 3]
    with torch.no_grad():
        mask = batch["attention_mask"].bool()
        assert torch.allclose(ours(**batch).logits[mask], model(**batch).logits[mask], atol=1e-5, rtol=0)

    report = convert_checkpoint(tmp_path / "ours", tmp_path / "back", direction="to_theirs")
    assert report.complete
    back, original = load_file(tmp_path / "back" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)
    old, new = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "back"))
    assert new == old
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("abc d").input_ids == tokenizer("abc d").input_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "bert", "ours"]  # no scratch left


def test_the_record_of_training(tmp_path, bert):
    folder, _ = bert
    record = folder / "training_summary.json"
    record.write_text('{"task": "fill-mask"}')
    convert_checkpoint(folder, tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "back")
    convert_checkpoint(folder, tmp_path / "other", head="ForTokenClassification")  # which was not trained
    kept = [(tmp_path / name / record.name).exists() for name in ("ours", "back", "other")]
    assert kept == [True, True, False]
    assert (tmp_path / "back" / record.name).read_bytes() == record.read_bytes()


def test_sharded_source_and_generation_settings(tmp_path):
    model = tiny("GPT2LMHeadModel").make()
    model.generation_config.update(temperature=0.5, do_sample=True, max_length=17)
    model.save_pretrained(tmp_path / "gpt2", max_shard_size="20KB")
    assert len(list((tmp_path / "gpt2").glob("*.safetensors"))) > 1
    report = convert_checkpoint(str(tmp_path / "gpt2"), str(tmp_path / "ours"))
    assert report.notes == ["the source has no tokenizer"]
    assert len(report.derived) == 2 * 2  # fused weights and biases of two layers
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert (ours.generation_config.temperature, ours.generation_config.max_length) == (0.5, 17)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        tiny("BartForConditionalGeneration"),
        tiny("T5ForConditionalGeneration", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        tiny("T5EncoderModel"),
    ],
    ids=lambda case: case.head,
)
def test_encoder_decoders_there_and_back(tmp_path, case):
    """Tied and untied tables and the buffer come back as they were saved."""
    case.make().save_pretrained(tmp_path / "theirs")
    convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    convert_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[key], original[key]) for key in original)


def test_paths_and_models_give_the_same(tmp_path, bert):
    folder, model = bert
    loaded, given = from_transformers(folder), from_transformers(model)
    assert all(torch.equal(tensor, given.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    given.save_pretrained(tmp_path / "ours")
    assert type(to_transformers(str(tmp_path / "ours"))) is transformers.BertForMaskedLM


def test_folders_at_home(tmp_path, bert, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bert" / "training_summary.json").write_text("{}")
    assert not convert_checkpoint("~/bert", "~/ours").notes
    swap_checkpoint("~/ours", "~/new", max_length=30, measure=False)
    assert (tmp_path / "ours" / "training_summary.json").exists() and (tmp_path / "new" / "tokenizer.json").exists()
    assert type(to_transformers("~/ours")) is transformers.BertForMaskedLM


@pytest.mark.parametrize(
    ("name", "file"), [("XLMRobertaModel", "sentencepiece.bpe.model"), ("DebertaV2Model", "spm.model")]
)
def test_pieces_of_a_tokenizer_are_not_left_behind(tmp_path, name, file):
    tiny(name).make().save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / file).write_bytes(b"no pieces")
    fails("The tokenizer of .* cannot be read", tmp_path / "theirs", tmp_path / "ours")


# ---------------------------------------------------------------------------------------------------- heads


def test_another_head(tmp_path):
    """The backbone and what both heads share are kept; the rest is new or dropped, by name."""
    tiny("BertForPreTraining").make().save_pretrained(tmp_path / "bert")
    report = convert_checkpoint(tmp_path / "bert", tmp_path / "ours", head="ForSequenceClassification")
    assert report.new == ["classifier.bias", "classifier.weight"]
    assert "cls.predictions.bias" in report.dropped and "cls.seq_relationship.weight" in report.dropped
    assert not any("bert.pooler" in name for name in report.dropped)
    ours = hf_xformers.XFBertForSequenceClassification.from_pretrained(tmp_path / "ours")
    source = load_file(tmp_path / "bert" / "model.safetensors")
    assert torch.equal(ours.model.pooler.dense.weight, source["bert.pooler.dense.weight"])

    report = convert_checkpoint(tmp_path / "bert", tmp_path / "masked", head="ForMaskedLM")
    assert not report.new
    names = ("bert.pooler.dense", "cls.seq_relationship")
    assert sorted(report.dropped) == [f"{name}.{end}" for name in names for end in ("bias", "weight")]


@pytest.mark.parametrize(
    ("name", "head", "new"),
    [
        ("BertModel", "ForMaskedLM", {"lm_head.dense.weight", "lm_head.norm.weight", "lm_head.decoder.bias"}),
        ("RobertaModel", "ForMaskedLM", {"lm_head.dense.weight", "lm_head.norm.weight", "lm_head.decoder.bias"}),
        ("RobertaModel", "ForSequenceClassification", {"classifier.weight", "model.pooler.dense.weight"}),
        ("GPT2Model", "ForCausalLM", set()),
        ("BartModel", "ForSeq2SeqLM", set()),
        ("T5Model", "ForSeq2SeqLM", set()),
    ],
)
def test_a_head_on_a_bare_checkpoint(tmp_path, name, head, new):
    """Tied output tables come with the backbone; what remains of the head is new. The same on the way back."""
    tiny(name).make().save_pretrained(tmp_path / "theirs")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", head=head)
    assert new <= set(report.new)
    assert bool(report.new) == bool(new)
    bare = convert_checkpoint(tmp_path / "theirs", tmp_path / "bare")
    assert bare.complete
    assert bool(convert_checkpoint(tmp_path / "bare", tmp_path / "back", head=head).new) == bool(new)


def test_another_head_of_a_loaded_model():
    model = tiny("BertForPreTraining").make()
    masked = from_transformers(model, head="ForMaskedLM")
    assert torch.equal(masked.lm_head.dense.weight, model.cls.predictions.transform.dense.weight)
    bare = from_transformers(tiny("BertForMaskedLM").make(), head="Model")
    assert bare.pooler is None and bare.config.add_pooler is False  # the source has none to give
    theirs = to_transformers(bare)
    assert theirs.pooler is None
    assert to_transformers(masked, head="Model").pooler is None
    with pytest.raises(ValueError, match="has no head 'ForPoetry'; it has: Model, ForMaskedLM"):
        from_transformers(model, head="ForPoetry")


def test_heads_without_counterpart():
    """The backbone converts where transformers has no class for the task."""
    source = from_transformers(tiny("OpenAIGPTModel").make())
    ours = hf_xformers.XFGPTForTokenClassification(source.config)
    ours.model.load_state_dict(source.state_dict())
    theirs = to_transformers(ours)
    assert type(theirs) is transformers.OpenAIGPTModel
    assert torch.equal(theirs.tokens_embed.weight, ours.model.trunk.embedding.tokens.weight)
    with pytest.raises(ValueError, match="no 'openai-gpt' class for the head 'ForTokenClassification'"):
        to_transformers(ours, head="ForTokenClassification")
    with pytest.raises(ValueError, match="GPT2PreTrainedModel has no counterpart; these do: GPT2Model"):
        from_transformers(transformers.GPT2PreTrainedModel(tiny("GPT2Model").entry.config()))


def test_old_checkpoints_without_prefix_and_with_buffers(tmp_path):
    """The published GPT-2 files name tensors without `transformer.` and hold causal masks."""
    model = tiny("GPT2LMHeadModel").make()
    model.save_pretrained(tmp_path / "gpt2")
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    save_file(tensors, path, metadata={"format": "pt"})
    ours = from_transformers(tmp_path / "gpt2")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


def test_pooler_in_a_masked_lm_checkpoint(tmp_path):
    """The published BERT and RoBERTa files hold more than the class that their config names."""
    for name, prefix in (("BertForMaskedLM", "bert"), ("RobertaForMaskedLM", "roberta")):
        folder = tmp_path / name
        tiny(name).make().save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        pooler = torch.randn(32, 32)
        tensors[f"{prefix}.pooler.dense.weight"], tensors[f"{prefix}.pooler.dense.bias"] = pooler, torch.zeros(32)
        tensors[f"{prefix}.embeddings.position_ids"] = torch.arange(24)[None]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        report = convert_checkpoint(folder, tmp_path / f"{name}-ours")
        assert sorted(report.dropped) == [f"{prefix}.pooler.dense.bias", f"{prefix}.pooler.dense.weight"]
        assert torch.equal(from_transformers(folder, head="Model").pooler.dense.weight, pooler)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification", "Model"])
def test_another_head_needs_the_same_body(tmp_path, head):
    """Of one of our folders: what only one of two heads has is new or left, what both have is missed."""
    from_transformers(tiny("BertForMaskedLM").make()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    swap_components(tmp_path, head=head, max_length=20, measure=False)
    name = "model.trunk.layers.0.attention.q_proj.weight"
    for tensors, message in (
        ({key: tensor for key, tensor in whole.items() if key != name}, "lacks .*q_proj.weight"),
        ({**whole, "model.trunk.further": torch.ones(2)}, "holds, beyond what its config describes, .*trunk.further"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            swap_components(tmp_path, head=head, max_length=20, measure=False)


# ---------------------------------------------------------------------------------------------------- failures


def fails(message, *arguments, **options):
    with pytest.raises(ValueError, match=message) as caught:
        convert_checkpoint(*arguments, **options)
    return caught.value


def test_sources_that_cannot_be_read(tmp_path, bert, monkeypatch):
    folder, _ = bert
    target = tmp_path / "out"
    fails(r"There is no folder '.*nowhere'", tmp_path / "nowhere", target)
    fails("There is no folder './nowhere'", "./nowhere", target)
    (tmp_path / "empty").mkdir()
    fails("has no config.json", tmp_path / "empty", target)

    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "nllb-moe"}))
    fails("whichever the router chooses", other, target)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "architectures": ["BertForPoetry"]}))
    fails("BertForPoetry has no counterpart .* give `head`", folder, target)
    assert convert_checkpoint(folder, tmp_path / "fine", head="Model").target == "XFBertModel"
    assert not target.exists()


def test_separate_token_tables_are_refused(tmp_path):
    model = tiny("BartModel").make(tie_word_embeddings=False)
    torch.nn.init.ones_(model.encoder.embed_tokens.weight)
    with pytest.raises(ValueError, match=r"'shared\.weight', 'encoder\.embed_tokens\.weight'.* hold different values"):
        from_transformers(model)


def test_targets_in_use(tmp_path, bert):
    folder, _ = bert
    target = tmp_path / "out"
    target.mkdir()
    convert_checkpoint(folder, target)  # an empty folder is fine
    before = files(target)
    fails("is not empty", folder, target)
    assert files(target) == before
    (target / "stale.txt").write_text("old")
    convert_checkpoint(folder, target, overwrite=True)
    assert files(target).keys() == before.keys()
    fails("same folder", folder, folder, overwrite=True)
    fails("same folder", folder, tmp_path / "out" / ".." / "bert", overwrite=True)
    note = tmp_path / "note.txt"
    note.write_text("text")
    fails("is a file", folder, note, overwrite=True)
    assert convert_checkpoint(folder, tmp_path / "deep" / "er").complete


def test_a_failure_leaves_the_target_as_it_was(tmp_path, bert, monkeypatch):
    folder, _ = bert
    target = tmp_path / "out"
    convert_checkpoint(folder, target)
    before = files(target)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    save = checkpoint.save

    def stop_halfway(model, path):
        save(model, path)
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save", stop_halfway)
    with pytest.raises(OSError, match="no space"):
        convert_checkpoint(folder, target, overwrite=True)
    assert files(target) == before
    with pytest.raises(OSError, match="no space"):
        convert_checkpoint(folder, tmp_path / "fresh")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names

    monkeypatch.setattr(checkpoint, "save", save)
    rename = checkpoint.Path.rename

    def stop_at_the_end(self, other):
        if self.name.endswith(".new"):
            raise OSError("the last step failed")
        return rename(self, other)

    monkeypatch.setattr(checkpoint.Path, "rename", stop_at_the_end)
    with pytest.raises(OSError, match="last step"):
        convert_checkpoint(folder, target, overwrite=True)
    assert files(target) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


def test_directions_and_types(tmp_path, bert):
    folder, model = bert
    fails("'to_theirs' does not fit .* holds a 'bert' model", folder, tmp_path / "out", direction="to_theirs")
    fails("`direction` is 'auto', 'to_ours' or 'to_theirs', got 'back'", folder, tmp_path / "out", direction="back")
    fails("has no head 'ForPoetry'", folder, tmp_path / "out", head="ForPoetry")
    ours = from_transformers(model)
    ours.save_pretrained(tmp_path / "ours")
    with pytest.raises(TypeError, match="is a model of this package already"):
        from_transformers(ours)
    with pytest.raises(TypeError, match="is no model of this package"):
        to_transformers(model)
    with pytest.raises(ValueError, match="use `from_pretrained`"):
        from_transformers(tmp_path / "ours")
    with pytest.raises(ValueError, match="use `from_pretrained`"):
        to_transformers(folder)
    with pytest.raises(TypeError, match="got int: 3"):
        from_transformers(3)


def test_reports_speak(tmp_path):
    tiny("GPT2DoubleHeadsModel").make().save_pretrained(tmp_path / "gpt2")
    report = convert_checkpoint(tmp_path / "gpt2", tmp_path / "ours")
    text, counts = report.summary(), "25 tensors mapped, 4 derived, 0 new, 2 dropped"
    assert text.splitlines()[0] == f"GPT2DoubleHeadsModel -> XFGPT2ForCausalLM: {counts}"
    assert "dropped: multiple_choice_head.summary.weight, multiple_choice_head.summary.bias" in text
    assert json.loads(json.dumps(report.to_dict()))["notes"] == ["the source has no tokenizer"]
    assert not report.complete


# ---------------------------------------------------------------------------------------------------- pickles


class Code:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return open, (str(self.place), "w")


@pytest.fixture
def pickled(tmp_path, bert):
    """A folder of old with `pytorch_model.bin` in place of safetensors; how it is written, and what it holds."""
    folder, model = bert
    (folder / "model.safetensors").unlink()

    def write(tensors, name="pytorch_model.bin", **options):
        torch.save(tensors, folder / name, **options)

    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    return folder, model, state, write


@pytest.mark.parametrize("new_zip", [True, False], ids=["zip", "before 1.6"])
def test_pickles_of_tensors(pickled, tmp_path, new_zip):
    folder, model, state, write = pickled
    write(state, _use_new_zipfile_serialization=new_zip)
    convert_checkpoint(folder, tmp_path / "out")
    swap_checkpoint(folder, tmp_path / "swapped", attention="talking_heads", measure=False)
    assert not list((tmp_path / "out").glob("*.bin")) and (tmp_path / "out" / "model.safetensors").exists()
    ids = torch.tensor([[5, 6, 7, 8]])
    for place in ("out", "swapped"):
        ours = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / place).eval()
        if place == "out":
            with torch.no_grad():
                torch.testing.assert_close(ours(ids).logits, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)


def test_pickles_in_parts(pickled, tmp_path):
    folder, model, state, write = pickled
    parts = {key: f"pytorch_model-0000{1 + index % 2}-of-00002.bin" for index, key in enumerate(state)}
    for name in set(parts.values()):
        write({key: tensor for key, tensor in state.items() if parts[key] == name}, name)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": parts}))
    convert_checkpoint(folder, tmp_path / "out")
    ids = torch.tensor([[5, 6, 7, 8]])
    ours = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    for outside in ("../pytorch_model.bin", str(tmp_path / "pytorch_model.bin"), "a/b.bin", "..", 3):
        index.write_text(json.dumps({"weight_map": {**parts, next(iter(parts)): outside}}))
        fails("names the file .* which is not in the folder|no index", folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("new_zip", [True, False], ids=["zip", "before 1.6"])
def test_pickles_with_code(pickled, tmp_path, new_zip):
    folder, _, state, write = pickled
    write({**state, "more": Code(tmp_path / "ran")}, _use_new_zipfile_serialization=new_zip)
    error = fails("holds code .*open.* which is not run; take the model as safetensors", folder, tmp_path / "out")
    assert "\n" not in str(error)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02no pickle at all")
    fails("cannot be read|holds code", folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
