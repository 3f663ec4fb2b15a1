"""transformers' own Trainer gets the losses that this package's does."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_xformers import XFormerConfig
from hf_xformers.modeling.head_classes import CLASSES
from hf_xformers.training.trainer import XFormerTrainer
from hf_xformers.variants import config_class, family
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tiny_fields, tokens
from tests.training.runs import plain_sgd, quiet

VOCAB = 40


def step_of(model, folder, data, batch, accumulated):
    """Parameters after a step of SGD."""
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated, "max_steps": 1}
    args = plain_sgd(folder, learning_rate=0.5, remove_unused_columns=True, **sizes)
    Trainer(model=model, args=args, train_dataset=data).train()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def made(name, head="ForCausalLM", **changes):
    torch.manual_seed(0)
    fields = tiny_fields(config_class(name), "decoder" if head == "ForCausalLM" else "encoder")
    fields |= {"vocab_size": VOCAB, **NO_DROPOUT, **changes}
    return family(name)[head](config_class(name)(**fields)).double()


@pytest.mark.parametrize("name", ["xf_gpt2", "xf_linear_transformer"])
@pytest.mark.parametrize("adapted", [False, True])
def test_label_smoothing_shifts_labels(name, adapted, tmp_path):
    model = made(name)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2))
    model.eval()
    ids = torch.randint(3, VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(model=model, args=quiet(tmp_path, label_smoothing_factor=0.1))
    with torch.no_grad():
        smoothed = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        logits = model(ids).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected, rtol=1e-5, atol=1e-5)


def rows_of(head, sides="right"):
    """Texts of unequal lengths; of SpanBERT's the inner tokens are spans."""
    made = []
    for seed, length in enumerate((9, 8, 4, 3)):
        ids, mask = pad([tokens(length, seed=seed, high=VOCAB)], 9, sides)
        row = {"input_ids": ids[0], "attention_mask": mask[0], "labels": ids[0].masked_fill(mask[0] == 0, -100)}
        if head == "ForSpanBoundary":
            places = torch.arange(1, 8)
            inside = places < length - 1
            row["labels"] = row["labels"].masked_fill(~F.pad(inside, (1, 1)), -100)
            row["span_labels"] = row["labels"][1:8]
            row["span_target_places"] = (places - 1) * inside
            row["span_boundaries"] = torch.tensor([[0, length - 1]]).expand(7, 2)
        made.append(row)
    return made


ACT = {"stack": {"type": "universal", "act": "accumulated", "act_loss_weight": 1.0}}
IMAGES = {"image_size": 4, "patch_size": 2, "num_channels": 1}
STEPS = {
    "ponder": ("xf_universal_transformer", "ForMaskedLM", ACT),
    "spans": ("xf_span_bert", "ForSpanBoundary", {}),
    **{
        head: ("xf_bert", head, {})
        for head in ("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
    },
    "images": ("xf_vision_transformer", "ForImageClassification", IMAGES),
}


def labelled(head):
    """Rows of other heads, whose losses are means over equally many targets."""
    pixels = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for number in range(4):
        ids = tokens(6, seed=number, high=VOCAB)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(number % 2)}
        if head == "ForImageClassification":
            row = {"pixel_values": pixels[number], "labels": row["labels"]}
        elif head == "ForQuestionAnswering":
            del row["labels"]
            row |= {"start_positions": torch.tensor(number), "end_positions": torch.tensor(number + 1)}
        elif head == "ForTokenClassification":
            row["labels"] = ids % 2
        yield row


@pytest.mark.parametrize("case", list(STEPS))
def test_micro_batches_make_the_step_of_one_batch(case, tmp_path):
    """With losses beside, and with means over the tokens that are predicted, whose number differs between rows."""
    name, head, changes = STEPS[case]
    data = rows_of(head) if case in ("ponder", "spans") else list(labelled(head))
    start = {key: value.clone() for key, value in made(name, head, **changes).named_parameters()}
    whole = step_of(made(name, head, **changes), tmp_path, data, 4, 1)
    parts = step_of(made(name, head, **changes), tmp_path, data, 1, 4)
    assert any(not torch.equal(whole[key], value) for key, value in start.items())
    for key, expected in whole.items():
        close(parts[key], expected, 1e-7 if head == "ForImageClassification" else 1e-9)


GLOBAL = "global_attention_mask"
READ = [
    (Trainer, "xf_longformer", {}, GLOBAL),
    (Trainer, "xf_bert", {}, "position_ids"),
    (XFormerTrainer, "xformer", {"attention": "longformer"}, GLOBAL),
    (Trainer, "xformer", {"attention": "longformer"}, GLOBAL),
    (Trainer, "xf_bert", {"attention": "longformer"}, GLOBAL),
]


@pytest.mark.parametrize(("kind", "name", "changes", "column"), READ)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering"])
def test_columns_that_a_model_reads_stay(head, kind, name, changes, column, tmp_path):
    data = [{**row, column: torch.arange(6) % 2, "source": "nobody"} for row in labelled(head)]
    trainer = kind(model=made(name, head, **changes), args=quiet(tmp_path, remove_unused_columns=True))
    assert next(iter(trainer.get_test_dataloader(data))).keys() == data[0].keys() - {"source"}


@pytest.mark.parametrize("name", ["xf_gpt2", "xf_linear_transformer"])
def test_padding_on_the_left_leaves_the_loss_a_mean(name, tmp_path):
    """Trainer counts the first token of a text as a target, which nothing predicts."""
    model = made(name)
    data = rows_of("ForCausalLM", "left")
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    with torch.no_grad():
        expected = sum((length - 1) * model(**row).loss for length, row in zip((9, 8, 4, 3), alone(data))) / 20
    trainer = Trainer(model=model, args=quiet(tmp_path), train_dataset=data)
    count = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    assert int(count) == 23
    with torch.no_grad():
        loss = trainer.compute_loss(model, batch, num_items_in_batch=count)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)


# Labels that a model itself leaves out: of padding, of the blank, of tokens without a tag, of the first token.
LEFT_OUT = {
    "ForMultiTokenPrediction": {},
    "ForReplacedTokenDetection": {},
    "ForReplacedTokenPreTraining": {"mask_token_id": 3},
    "ForTokenClassification": {"tag_decoder": "crf"},
}


def counted(kind, model, batch, folder):
    """A Trainer's loss of a batch that is the whole step."""
    trainer, batches = kind(model=model, args=quiet(folder)), [dict(batch)]
    count = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    with torch.no_grad():
        return trainer.compute_loss(model, trainer._prepare_inputs(batches[0]), num_items_in_batch=count)


@pytest.mark.parametrize("kind", [Trainer, XFormerTrainer])
@pytest.mark.parametrize("head", LEFT_OUT)
def test_labels_that_a_model_leaves_out_do_not_count(head, kind, tmp_path):
    torch.manual_seed(0)
    config = XFormerConfig(vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, **NO_DROPOUT, **LEFT_OUT[head])
    model = make_strong(CLASSES[head](config)).double().eval()
    ids, mask = pad([tokens(6, high=VOCAB), tokens(3, seed=1, high=VOCAB)], 6, "right")
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    if head == "ForMultiTokenPrediction":
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif head != "ForReplacedTokenPreTraining":
        batch["labels"] = ids % 2
    if head == "ForTokenClassification":
        batch["tag_mask"] = mask * (torch.arange(6) != 1)
    with torch.no_grad():
        expected = model(**batch).loss
    torch.testing.assert_close(counted(kind, model, batch, tmp_path), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", [Trainer, XFormerTrainer])
def test_the_blank_of_a_transcript_does_not_count(kind, tmp_path):
    model = made("xf_conformer", "ForCTC").eval()
    features = torch.randn(2, 40, model.config.num_mel_bins, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([[5, 6, 7, 8], [5, -100, -100, -100]])
    blank = labels.masked_fill(labels == -100, model.config.pad_token_id)
    found, expected = (
        counted(kind, model, {"input_features": features, "labels": each}, tmp_path) for each in (blank, labels)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_smoothing_is_refused_where_a_model_learns_from_more_than_its_last_logits(tmp_path):
    args = quiet(tmp_path, label_smoothing_factor=0.1)
    config = XFormerConfig(vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, is_decoder=True)
    for model in (made("xf_depth_adaptive_transformer"), CLASSES["ForMultiTokenPrediction"](config)):
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
        for each in (model, adapted):
            with pytest.raises(ValueError, match=f"{type(each).__name__} learns from further ones; leave it out"):
                XFormerTrainer(model=each, args=args)
    ids = tokens(6, high=VOCAB)[None]
    found = Trainer(model=model.eval(), args=args).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[0, :-1]
    torch.testing.assert_close(found, F.cross_entropy(logits, ids[0, 1:], label_smoothing=0.1))


def alone(data):
    for row in data:
        real = row["attention_mask"].bool()
        yield {key: value[real][None] for key, value in row.items()}


# Models that read their parameters as a list, or ask for their type, which replicas have none of.
COMPRESSES = {"stack": {"type": "compressive", "memory_length": 2, "compressed_length": 2, "compression_rate": 2}}
REPLICAS = [
    ("xf_reformer", "ForMaskedLM", {}),
    ("xf_sac", "ForMaskedLM", {}),
    ("xf_sac", "ForSequenceClassification", {}),
    ("xf_compressive_transformer", "ForCausalLM", COMPRESSES),
    ("xf_compressive_transformer", "ForCausalLM", {}),
    ("xf_complex_order", "ForMaskedLM", {}),
]


@pytest.mark.parametrize(("name", "head", "changes"), REPLICAS)
def test_replicas_learn_as_the_model_does(name, head, changes, monkeypatch):
    """As nn.DataParallel makes them, which Trainer takes where a machine has several GPUs; here without devices."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    data = list(labelled(head)) if head == "ForSequenceClassification" else rows_of(head)
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    model = made(name, head, **changes).train()
    model(**batch).loss.backward()  # choices learn from the second pass on
    model.zero_grad()
    alone = copy.deepcopy(model)
    replica = module.replicate(model, [0, 1])[0]
    if head != "ForSequenceClassification":
        batch["num_items_in_batch"] = torch.tensor([[20]])  # of one replica, as they are scattered
    for run in (alone, replica):
        torch.manual_seed(0)
        run(**batch).loss.sum().backward()
    for key, parameter in alone.named_parameters():
        if parameter.grad is not None:
            close(model.get_parameter(key).grad, parameter.grad, 1e-9)
    with torch.no_grad():
        close(replica.eval()(**batch).logits, alone.eval()(**batch).logits, 1e-9)


def broadcast(tensors, devices, detach=False):
    return [[tensor if detach else tensor * 1 for tensor in tensors] for _ in devices]


def test_an_encoder_decoder_that_classifies_predicts_logits_alone(tmp_path):
    data = list(labelled("ForSequenceClassification"))
    model = made("xf_t5", "ForSequenceClassification")
    predictions = Trainer(model=model, args=quiet(tmp_path)).predict(data).predictions
    assert predictions.shape == (4, model.config.num_labels)  # and no tuple with the encoder's states
