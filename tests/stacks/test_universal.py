"""The Universal Transformer's stack: hand-written signals, and ACT one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM, XFormerModel
from hf_xformers.blocks.base import LayerOutput
from hf_xformers.core.call import Call
from hf_xformers.position.base import Position
from hf_xformers.stacks.driver import Pass
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "position": "none",
    **NO_DROPOUT,
}
RULES = ("accumulated", "overwrite")
HALTED = ("copy", "keep_updating")


def model(cls=XFormerModel, *, spread=1.0, bias=-0.5, **stack):
    """A float64 model whose tokens halt at different steps."""
    fields = {key: stack.pop(key) for key in list(stack) if key in XFormerConfig.__dataclass_fields__}
    torch.manual_seed(0)
    net = make_strong(
        cls(XFormerConfig(**{**SIZES, **fields, "stack": {"type": "universal", **stack}})).double().eval()
    )
    for module in net.modules():
        if hasattr(module, "halting") and module.halting is not None:
            nn.init.normal_(module.halting.gate.weight, std=spread)
            nn.init.constant_(module.halting.gate.bias, bias)
    return net


def calls(net, ids, **more):
    """The inputs [B, T, D] of every run of a layer in one forward pass, and the output."""
    seen, net.under_a_head = [], True  # a head is told the losses also where no gradient is recorded
    hook = net.trunk.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        output = net(input_ids=ids, **more)
    hook.remove()
    return seen, output


# ------------------------------------------------------------------------------------------------ without ACT


def test_signal_is_the_papers():
    """Layer t reads H + P^t; P by the formula, one entry at a time."""
    net, ids, states = model(num_hidden_layers=3), tokens(1, 5), []
    net.trunk.layers[0].register_forward_hook(lambda module, args, output: states.append(output[0]))
    seen, _ = calls(net, ids)
    states.insert(0, net.trunk.embedding.tokens(ids))
    assert len(seen) == 3
    for step, given in enumerate(seen, start=1):
        signal = torch.zeros(5, 16, dtype=torch.float64)
        for place in range(5):
            for pair in range(8):
                rate = 10000 ** (-2 * pair / 16)
                signal[place, 2 * pair] = math.sin(place * rate) + math.sin(step * rate)
                signal[place, 2 * pair + 1] = math.cos(place * rate) + math.cos(step * rate)
        close(given, states[step - 1] + signal, 1e-6)  # sinusoids are computed in float32


# ------------------------------------------------------------------------------------------------ ACT by hand


class Outputs(nn.Module):
    """Stands for a layer: gives the prepared output of each run, whatever comes in, and keeps what came in."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs, self.seen = outputs, []

    def prepare(self, context, past_key_values):
        pass

    def forward(self, hidden_states, memory, states, *, context, step, past_key_values):
        self.seen.append(hidden_states)
        return LayerOutput(self.outputs[step], states, {})


def context(length, padding=None):
    index = torch.arange(length)
    return Call(
        padding_mask=padding, positions=index[None], query_index=index, key_index=index, causal=False, fresh=True
    )


def run(probabilities, outputs, start=None, padding=None, **stack):
    """The stack alone, with given halting probabilities [N, B, T] and layer outputs [N, B, T, D]."""
    steps, batch, length, width = outputs.shape
    net = model(num_hidden_layers=steps, hidden_size=width, position_signal=False, step_signal="none", **stack).trunk
    given = iter(probabilities)
    net.stack.halting.probability = lambda states: next(given)
    layer = Outputs(outputs)
    start = torch.zeros(batch, length, width, dtype=outputs.dtype) if start is None else start
    result = net.stack(Pass([layer], start, context(length, padding), Position()))
    return result, layer


def one_token(probabilities, outputs, act, epsilon):
    """Graves' adaptive computation for one token, step by step: output [D], N and R."""
    spent, output = 0.0, torch.zeros_like(outputs[0])
    for step, (probability, state) in enumerate(zip(probabilities.tolist(), outputs), start=1):
        last = step == len(outputs)
        halts = spent + probability > 1 - epsilon
        weight = 1 - spent if halts or (last and act == "accumulated") else probability
        output = output + weight * state if act == "accumulated" else weight * state + (1 - weight) * output
        if halts or last:
            return output, step, 1 - spent
        spent += probability


@pytest.mark.parametrize("act", RULES)
def test_act_one_token_at_a_time(act):
    """Output and ponder loss of a random padded batch; every number of steps occurs, not halting included."""
    generator = torch.Generator().manual_seed(0)
    steps, batch, length = 5, 6, 8
    probabilities = torch.rand(steps, batch, length, generator=generator, dtype=torch.float64)
    probabilities = (probabilities * torch.linspace(0.1, 2.0, length)).clamp(max=1)
    outputs = torch.randn(steps, batch, length, 4, generator=generator, dtype=torch.float64)
    padding = torch.rand(batch, length, generator=generator) > 0.2
    result, _ = run(probabilities, outputs, padding=padding, act=act, act_loss_weight=0.5, act_epsilon=0.05)
    pondered, numbers = [], set()
    for row in range(batch):
        for place in range(length):
            if not padding[row, place]:
                assert (result.hidden_states[row, place] == 0).all(), "padding has an output"
                continue
            output, number, remainder = one_token(probabilities[:, row, place], outputs[:, row, place], act, 0.05)
            close(result.hidden_states[row, place], output)
            pondered.append(number + remainder)
            numbers.add(number)
    assert numbers == {1, 2, 3, 4, 5}
    close(result.aux_losses["ponder"], torch.tensor(0.5 * sum(pondered) / len(pondered), dtype=torch.float64))


@pytest.mark.parametrize("halted_state", HALTED)
def test_state_of_a_halted_token(halted_state):
    """Copied, the state that its last step gave is what later steps read; or it goes on changing."""
    probabilities = torch.tensor([[0.995, 0.1], [0.5, 0.1], [0.5, 0.1]], dtype=torch.float64)[:, None]
    outputs = torch.randn(3, 1, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.full((1, 2, 4), 7.0, dtype=torch.float64)
    _, layer = run(probabilities, outputs, start, act="accumulated", halted_state=halted_state)
    first, second, third = layer.seen
    assert torch.equal(first, start) and torch.equal(second, outputs[0])
    assert torch.equal(third[0, 1], outputs[1, 0, 1])
    assert torch.equal(third[0, 0], outputs[0 if halted_state == "copy" else 1, 0, 0])


# ------------------------------------------------------------------------------------------------ ACT in a model


@pytest.mark.parametrize("act", RULES)
@pytest.mark.parametrize("halted_state", HALTED)
def test_a_row_does_not_depend_on_the_batch(act, halted_state):
    """Each text alone gives what it gives beside slower ones, padded on either side."""
    net = model(act=act, halted_state=halted_state)
    rows = [tokens(length, seed=length) for length in (1, 3, 8, 12)]
    alone = [calls(net, row[None]) for row in rows]
    assert len({len(seen) for seen, _ in alone}) > 1, "all texts take as many steps: nothing is tested"
    for side in ("left", "right"):
        batch, mask = pad(rows, 12, side, seed=3)
        _, together = calls(net, batch, attention_mask=mask)
        for index, (_, expected) in enumerate(alone):
            close(together.last_hidden_state[index][mask[index].bool()], expected.last_hidden_state[0])
        total = sum(len(row) * expected.aux_losses["ponder"] for row, (_, expected) in zip(rows, alone))
        close(together.aux_losses["ponder"], total / sum(map(len, rows)))


def test_seq2seq_pays_for_both_towers():
    net = model(XFormerForSeq2SeqLM, act="accumulated", num_decoder_layers=3)
    ids = tokens(2, 7)
    output = net(input_ids=ids, labels=ids)
    assert set(output.aux_losses) == {"encoder_ponder", "decoder_ponder"}
    plain = nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())
    close(output.loss, plain + sum(output.aux_losses.values()))
    halting = [name for name, _ in net.named_parameters() if "halting" in name]
    assert len(halting) == 4, "a tower lacks its halting unit"


def test_recording_runs_all_steps():
    """One state per step whatever halts, and the same result."""
    net, ids = model(act="accumulated", bias=3.0), tokens(2, 7)
    seen, output = calls(net, ids)
    assert len(seen) < 6
    seen, recorded = calls(net, ids, output_hidden_states=True, output_attentions=True)
    assert len(seen) == 6 and len(recorded.hidden_states) == 7 and len(recorded.attentions) == 6
    close(recorded.last_hidden_state, output.last_hidden_state)
    close(recorded.aux_losses["ponder"], output.aux_losses["ponder"])


def test_layers_do_not_differ():
    config = XFormerConfig(**SIZES, stack="universal", per_layer_config={0: {"feedforward": "relu"}})
    with pytest.raises(ValueError, match="leave out `per_layer_config`"):
        XFormerModel(config)
