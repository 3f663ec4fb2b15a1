"""trl's SFTTrainer, from a model object and from a local folder, and its padding-free batches."""

import pytest
import torch
from datasets import Dataset

from tests.clients.checkpoints import CAUSAL, TEXTS, build, met, save, tokenizer
from tests.common.cases import defaults

trl = pytest.importorskip("trl")

# trl multiplies the last states by the output matrix itself and never calls the head.
PROJECTING = met([name for name in CAUSAL if defaults(name).head.type == "linear"])


def train(model, folder, rows=None, **settings):
    fields = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "bf16": False}
    fields |= {"max_length": 24, "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "seed": 0}
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(str(folder), **{**fields, **settings}),
        train_dataset=Dataset.from_dict({"text": TEXTS}) if rows is None else rows,
        processing_class=tokenizer("bos"),
    )
    before = {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.named_parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == trainer.args.max_steps and all(0 < loss < 100 for loss in losses)
    return trainer, losses


@pytest.mark.parametrize("name", PROJECTING)
def test_model_object(name, tmp_path):
    """The loss is the model's own, but for losses beside that of tokens, which trl leaves out."""
    model = build(name, "ForCausalLM")
    model.eval()
    rows = Dataset.from_dict({"input_ids": tokenizer("bos")(TEXTS[:1]).input_ids})
    ids = torch.tensor(rows["input_ids"])
    logits = model(ids).logits.detach()
    trl.trainer.utils.add_fused_lm_head(model)
    fused = model(ids, labels=ids, fused_lm_head=True).loss
    torch.testing.assert_close(fused, torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    del model.forward
    rows = Dataset.from_dict({"input_ids": tokenizer("bos")(TEXTS[:2]).input_ids})
    assert train(model, tmp_path, rows, max_steps=1)[0].model is model


def test_local_folder(tmp_path):
    """By path: the class comes from the config. The result loads again."""
    from transformers import AutoModelForCausalLM

    model = build("xf_performer", "ForCausalLM")
    folder = save(model, "ForCausalLM", tmp_path / "model")
    trainer, losses = train(folder, tmp_path / "run", model_init_kwargs={"dtype": "float32"})
    assert type(trainer.model) is type(model)
    assert losses == train(model, tmp_path / "again")[1]
    trainer.save_model(str(tmp_path / "tuned"))
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")) is type(model)


@pytest.mark.parametrize("packing", ["padding_free", "packing"])
def test_rows_without_padding(packing, tmp_path):
    """Texts joined into one row: kept apart where the attention can, refused in one sentence where it cannot."""
    settings = {packing: True, "max_length": 12 if packing == "packing" else None}
    train(build("xf_gpt2", "ForCausalLM"), tmp_path / "dense", **settings)
    with pytest.raises(ValueError, match="packed documents"):
        train(build("xf_performer", "ForCausalLM"), tmp_path / "performer", **settings)


def test_padding_free_equals_padded(tmp_path):
    losses = [
        train(build("xf_gpt2", "ForCausalLM"), tmp_path / str(free), padding_free=free, max_length=None)[1]
        for free in (False, True)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("name", ["xf_longformer", "xf_scale_norm"])
def test_heads_that_trl_leaves_out(name):
    """With a transform, or vectors of unit length, its losses would be another model's."""
    with pytest.raises(ValueError, match="trl makes logits .* does more; train with transformers' Trainer"):
        trl.trainer.utils.add_fused_lm_head(build(name, "ForCausalLM"))
