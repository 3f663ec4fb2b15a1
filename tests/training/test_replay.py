"""Memory replay in the trainer: gradients through the micro-batches of a step, exact resumption."""

import pytest
import torch

from hf_xformers.variants.memformer import XFMemformerConfig, XFMemformerForCausalLM
from tests.helpers import NO_DROPOUT, close
from tests.training.runs import same_parameters
from tests.training.test_segments import rows, train
from tests.training.test_trainer import VOCAB, logged

STEPS, PARTS = 3, 3


def model(dropout=0.0, replay=True):
    torch.manual_seed(0)
    return XFMemformerForCausalLM(
        XFMemformerConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            initializer_range=0.3,
            stack={"type": "memformer", "num_slots": 3, "replay": replay},
            **{**NO_DROPOUT, "hidden_dropout_prob": dropout},
        )
    )


def by_hand(data, through):
    """Losses and parameters of training with one graph per step, or with a cut after every segment."""
    trained, losses, memory = model(replay=through).train(), [], None
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    length = len(data) // 2
    for step in range(STEPS):
        parts = []
        for part in range(PARTS):
            time = step * PARTS + part
            ids = torch.stack([data[time]["input_ids"], data[length + time]["input_ids"]])
            output = trained(ids, labels=ids, segment_memory=memory, use_cache=False)
            memory = output.segment_memory if through else output.segment_memory.detach()
            parts.append(output.loss / PARTS)
        memory = memory.detach()
        loss = torch.stack(parts).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, trained


@pytest.mark.parametrize("replay", [True, False])
def test_steps_are_those_of_one_graph(tmp_path, replay):
    data, trained = rows(2 * STEPS * PARTS), model(replay=replay)
    trainer = train(trained, tmp_path, data, max_steps=STEPS, gradient_accumulation_steps=PARTS)
    losses, expected = by_hand(data, replay)
    close(torch.tensor(logged(trainer, "loss")), torch.tensor(losses), 1e-4)
    same_parameters(trained, expected, 1e-5, 1e-5)
    _, other = by_hand(data, not replay)
    writer = "model.trunk.stack.writer.v_proj.weight"
    difference = trained.get_parameter(writer) - other.get_parameter(writer)
    assert difference.abs().max() > 1e-5  # cutting the gradient is another training


def test_resumption_is_exact(tmp_path):
    data = rows(2 * STEPS * PARTS)
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": PARTS, "save_strategy": "steps", "save_steps": 2}
    whole = model(dropout=0.2)
    train(whole, tmp_path / "whole", data, **settings)
    resumed = model(dropout=0.2)
    train(resumed, tmp_path / "whole", data, resume=str(tmp_path / "whole" / "checkpoint-2"), **settings)
    same_parameters(whole, resumed, 0, 0)
