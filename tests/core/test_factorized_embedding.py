"""The factorized token table and the head that leads back to its width, by their formulas."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig, XFormerForMaskedLM, XFormerModel
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
FIELDS = {"embedding": {"type": "factorized", "width": 6}, "head": "transform", "type_vocab_size": 2}


def model(kind=XFormerForMaskedLM, **fields):
    torch.manual_seed(0)
    return make_strong(kind(XFormerConfig(**{**SIZES, **FIELDS, **fields})).eval())


@torch.no_grad()
@pytest.mark.parametrize("position", ["sinusoidal_absolute", "rotary"])
def test_formula(position):
    net, ids, types = (
        model(XFormerModel, position=position).double(),
        tokens(2, 5, high=40),
        tokens(2, 5, low=0, high=2),
    )
    part, seen = net.trunk.embedding, []
    part.register_forward_hook(lambda _, __, output: seen.append(output))
    net(input_ids=ids, token_type_ids=types)
    narrow = part.tokens.weight[ids] + part.types.weight[types]
    narrow = F.layer_norm(narrow, (6,), part.norm.weight, part.norm.bias, net.config.layer_norm_eps)
    expected = narrow @ part.proj.weight.T + part.proj.bias
    close(seen[0], net.trunk.position.embed(expected, torch.arange(5)[None]))
    close(net(inputs_embeds=part.tokens.weight[ids], token_type_ids=types).last_hidden_state,
          net(input_ids=ids, token_type_ids=types).last_hidden_state)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("position", ["sinusoidal_absolute", "learned_absolute"])
def test_narrow_positions(position):
    """W norm(E[w] + type[s] + P) + b, the positions at the table's width."""
    embedding = {"type": "factorized", "width": 6, "narrow_positions": True}
    net = model(XFormerModel, position=position, embedding=embedding).double()
    ids, part, seen = tokens(2, 5, high=40), net.trunk.embedding, []
    part.register_forward_hook(lambda _, __, output: seen.append(output))
    net(input_ids=ids)
    if position == "learned_absolute":
        places = net.trunk.position.table.weight[:5]
        assert places.shape == (5, 6)
    else:
        angles = torch.arange(5)[:, None] * 10000.0 ** (-torch.tensor([0, 0, 2, 2, 4, 4]) / 6)
        places = torch.where(torch.arange(6) % 2 == 0, angles.sin(), angles.cos())
    narrow = part.tokens.weight[ids] + part.types.weight[0] + places
    narrow = F.layer_norm(narrow, (6,), part.norm.weight, part.norm.bias, net.config.layer_norm_eps)
    close(seen[0], narrow @ part.proj.weight.T + part.proj.bias, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_linear_there_and_back(tied):
    """Without norm and biases, and with the head `factorized`: W P h, W the table or a matrix of its own."""
    embedding = {"type": "factorized", "width": 6, "normalize": False, "bias": False}
    fields = {"embedding": embedding, "head": {"type": "factorized", "bias": True}, "tie_word_embeddings": tied}
    net, ids = model(**fields, position="none", type_vocab_size=0).double(), tokens(2, 5, high=40)
    part, head, seen = net.model.trunk.embedding, net.lm_head, []
    part.register_forward_hook(lambda _, __, output: seen.append(output))
    output = net(input_ids=ids, output_hidden_states=True)
    close(seen[0], part.tokens.weight[ids] @ part.proj.weight.T)
    table = part.tokens.weight if tied else head.decoder.weight
    assert head.dense.weight.shape == (6, 16) and head.dense.bias is None and table.shape == (40, 6)
    close(output.logits, output.hidden_states[-1] @ head.dense.weight.T @ table.T + head.decoder.bias)
