"""Voting early exit: against votes counted text by text."""

import math
from collections import Counter

import pytest
import torch

from tests.helpers import close
from tests.stacks.test_early_exit import LAYERS, all_logits, batch, build


def by_votes(logits, tau, power, least):
    """(layer, logits) of one text, from its logits at every layer."""
    for layer in range(1, len(logits) + 1):
        votes = Counter(row.argmax().item() for row in logits[:layer])
        most = max(votes.values())
        if layer == len(logits) or (layer >= least and most / layer**power >= tau - 1e-9):
            means = {
                label: torch.stack([row for row in logits[:layer] if row.argmax() == label]).mean(0)
                for label, count in votes.items()
                if count == most
            }
            winner = max(means, key=lambda label: means[label][label])
            return layer, means[winner]


@pytest.mark.parametrize(
    ("tau", "power", "least"), [(None, 0.5, 2), (2, 0, 1), (0.7, 1, 2), (math.inf, 0.5, 1), (3**0.5, 0.5, 1)]
)
def test_votes(tau, power, least):
    net = build("voting_exit", vote_threshold=tau, vote_lambda=power, min_layers=least)
    rows, (ids, mask) = batch()
    every = torch.stack(all_logits(net, input_ids=ids, attention_mask=mask))
    tau = (LAYERS / 2) ** (1 - power) if tau is None else tau
    expected = [by_votes(every[:, index], tau, power, least) for index in range(len(rows))]
    layers = [layer for layer, _ in expected]
    assert layers == [LAYERS] * len(rows) if tau == math.inf else len(set(layers)) >= 2
    with torch.no_grad():
        output = net(input_ids=ids, attention_mask=mask)
        assert output.exit_layers.tolist() == layers
        for index, (_, logits) in enumerate(expected):
            close(output.logits[index], logits)
            alone = net(input_ids=rows[index][None])
            assert alone.exit_layers.item() == layers[index]
            close(alone.logits[0], logits)
        recorded = net(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        close(recorded.logits, output.logits)


def test_training_loss():
    """sum_l l (CE_l - beta min(CE(p_i, p_l), log C)) / sum_l l; without beta that of PABEE."""
    net = build("voting_exit", diversity_weight=0.3).train()
    rows, (ids, mask) = batch()
    labels = torch.arange(len(rows)) % 3
    answers = [one.log_softmax(-1) for one in all_logits(net, input_ids=ids, attention_mask=mask)]
    total = 0.0
    for number, logs in enumerate(answers, start=1):
        own = torch.nn.functional.nll_loss(logs, labels)
        crosses = [-(before.exp() * logs).sum(-1).clamp(max=math.inf) for before in answers[: number - 1]]
        near = torch.stack(crosses).min(0).values.clamp(max=math.log(3)).mean() if crosses else 0.0
        total += number * (own - 0.3 * near)
    loss = net(ids, attention_mask=mask, labels=labels).loss
    close(loss, total / 15)
    loss.backward()
    assert all(one.weight.grad.abs().sum() > 0 for one in net.exits.classifiers)
    plain, patience = build("voting_exit", diversity_weight=0).train(), build("patience_exit").train()
    patience.load_state_dict(plain.state_dict())
    close(plain(ids, labels=labels).loss, patience(ids, labels=labels).loss)


def test_numbers_do_not_vote():
    net = build("voting_exit", labels=1, problem_type="regression")
    assert net(batch()[1][0]).exit_layers.tolist() == [LAYERS] * 24
