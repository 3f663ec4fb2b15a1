"""Hard-concrete gates: the distribution that they draw from, the penalty in the loss, and the model that they
leave."""

import math

import pytest
import torch

from hf_xformers.compression.gates import BETA, GAMMA, ZETA, GatedHeads, HeadGates
from hf_xformers.compression.head_pruning import head_layers, prune_heads
from tests.compression.models import batch, tiny
from tests.helpers import close


def test_a_gate_is_open_as_often_as_the_penalty_counts():
    gates = HeadGates(3)
    gates.location.data = torch.tensor([-1.0, 0.0, 1.0])
    torch.manual_seed(0)
    draws = torch.stack([gates.sampled() for _ in range(4000)])
    assert draws.min() == 0 and draws.max() == 1
    share = (draws > 0).double().mean(0)
    for a, found in zip((-1.0, 0.0, 1.0), share):
        expected = 1 / (1 + math.exp(-(a - BETA * math.log(-GAMMA / ZETA))))
        assert float(found) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5)
    total = sum(1 / (1 + math.exp(-(a - BETA * math.log(-GAMMA / ZETA)))) for a in (-1.0, 0.0, 1.0))
    assert float(gates.open_gates()) == pytest.approx(total, rel=1e-5)


def test_the_loss_has_the_share_of_open_gates_in_training_alone():
    model, inputs = tiny(double=False), batch()
    with torch.no_grad():
        plain = float(model(**inputs).loss)
    gated = GatedHeads(model, head_layers(model), weight=0.5, speed=1.0)
    for gates in gated.gates():
        gates[0].location.data[:] = 20.0  # all open, whatever is drawn
    with torch.no_grad():
        assert float(model(**inputs).loss) == pytest.approx(plain, rel=1e-5)
        assert float(model.train()(**inputs).loss) == pytest.approx(plain + 0.5, rel=1e-4)
    step = 4 * (inputs["labels"][:, 1:] != -100).sum()  # of which this batch is a quarter
    with torch.no_grad():
        counted = float(model(**inputs, num_items_in_batch=step).loss)
    assert counted == pytest.approx((plain + 0.5) / 4, rel=1e-4)
    loss = model(**inputs).loss
    loss.backward()
    assert all(gates[0].location.grad is not None for gates in gated.gates())

    del inputs["labels"]  # the loss is made of the logits elsewhere
    assert float(model(**inputs).aux_losses["head_gates"]) == pytest.approx(0.5, rel=1e-5)
    assert model.eval()(**inputs).aux_losses is None


def test_closed_gates_leave_a_smaller_model_that_computes_the_same():
    model, inputs = tiny(), batch()
    gated = GatedHeads(model, head_layers(model), weight=0.5, speed=1.0)
    values = torch.tensor([[-9.0, 0.3, 9.0, -9.0], [-9.0, -8.0, -7.0, -9.0], [9.0, 9.0, 1.0, 9.0]])
    for gates, value in zip(gated.gates(), values):
        gates[0].location.data = value
    with torch.no_grad():
        expected = model(**inputs).logits
    kept = gated.open_heads()
    assert [rows[0] for rows in kept.values()] == [[1, 2], [2], [0, 1, 2, 3]]
    gated.fold()
    assert not any("head_gates" in name for name, _ in model.named_modules())
    pruned = prune_heads(model, kept)
    with torch.no_grad():
        close(model(**inputs).logits, expected, 1e-6)
        close(pruned(**inputs).logits, expected, 1e-6)
