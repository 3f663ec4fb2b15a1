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


SCALED = {"head": {"type": "linear", "scale": 0.5, "bias": True}}


@pytest.mark.parametrize("name, fields", [("xf_longformer", {}), ("xf_scale_norm", {}), ("xf_gpt2", SCALED)])
def test_heads_that_trl_leaves_out(name, fields):
    """With a transform, vectors of unit length or a bias that is not scaled, its losses would be another model's."""
    model = build(name, "ForCausalLM", **fields)
    with pytest.raises(ValueError, match="trl makes logits .* does more; train with transformers' Trainer"):
        trl.trainer.utils.add_fused_lm_head(model)
    with pytest.raises(ValueError, match="trl makes logits .* does more; train with transformers' Trainer"):
        trl.models.utils._ForwardRedirection()(model, model, lambda: None)  # of distillations


@pytest.mark.parametrize("head", ["linear", {"type": "linear", "scale": 0.5, "cap": 3.0}])
def test_head_in_float32(head, tmp_path):
    """`cast_lm_head_to_fp32`: what is trained, and written with, is the model with a head in float32."""
    model = build("xf_gpt2", "ForCausalLM", head=head).bfloat16()
    trainer = trl.GRPOTrainer(
        model=save(model, "ForCausalLM", tmp_path / "model"),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(
            str(tmp_path / "run"),
            model_init_kwargs={"dtype": "bfloat16"},
            cast_lm_head_to_fp32=True,
            per_device_train_batch_size=2,
            num_generations=2,
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer("bos"),
    )
    ids = tokenizer("bos")(TEXTS[:1], return_tensors="pt").input_ids
    with torch.no_grad():
        states = model.model(ids).last_hidden_state
        expected = model.lm_head.float()(states.float())
        found = trainer.model(ids).logits
        fused = trainer.model(ids, labels=ids, fused_lm_head=True).log_probs
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(fused[0], found[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
