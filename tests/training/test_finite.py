"""Weights that are no numbers are refused where they are loaded, and losses that are none are reported."""

import logging

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.conversion.swap import open_model
from hf_xformers.finetuning import loading
from hf_xformers.objectives import OBJECTIVES
from hf_xformers.training import scoring
from tests.training.test_trainer import config, logged, train

TENSOR = "model.trunk.layers.0.attention.q_proj.weight"


@pytest.fixture(scope="module", params=[float("nan"), float("inf")], ids=["nan", "inf"])
def broken(request, tmp_path_factory):
    model, folder = XFormerForMaskedLM(config()), tmp_path_factory.mktemp("broken")
    with torch.no_grad():
        model.get_parameter(TENSOR)[0, 0] = request.param
    model.save_pretrained(folder)
    return str(folder)


LOADERS = {
    "evaluate": lambda name: scoring.load_model(name, OBJECTIVES["mlm"]()),
    "finetune": lambda name: loading.load_model(
        name, XFormerConfig.from_pretrained(name), "SequenceClassification", has_head=False, new_head=True
    ),
    "uptrain": open_model,
}


@pytest.mark.parametrize("command", LOADERS)
def test_commands_refuse_them(command, broken):
    with pytest.raises(
        ValueError, match=f"the weights '{TENSOR}' of .* are not finite numbers.*take an earlier checkpoint"
    ):
        LOADERS[command](broken)


def test_a_checkpoint_is_not_resumed(tmp_path):
    trainer = train(XFormerForMaskedLM(config()), tmp_path, save_strategy="steps", save_steps=1)
    with torch.no_grad():
        trainer.model.get_parameter(TENSOR)[0, 0] = float("nan")
    trainer.model.save_pretrained(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=f"the weights '{TENSOR}' of .*checkpoint-1"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_diverging_run_says_so(tmp_path, caplog):
    for rate, count in ((0.05, None), (1e30, 3)):
        with caplog.at_level(logging.WARNING):
            logging.getLogger("hf_xformers.training.trainer").addHandler(caplog.handler)
            trainer = train(
                XFormerForMaskedLM(config()), tmp_path / str(rate), learning_rate=rate, max_steps=4, logging_steps=4
            )
        assert logged(trainer, "non_finite_losses") == ([count] if count else [])
        assert ("3 training losses up to step 4 were NaN or infinite" in caplog.text) is bool(count)
