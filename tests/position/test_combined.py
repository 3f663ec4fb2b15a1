"""Several positions at once: each does what it does alone."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, **NO_DROPOUT
)
INSIDE = ("t5_relative_bias", "rotary", "deberta", "shaw_relative", "floater", "tupe")


def model(position, kind=XFormerModel, **fields):
    torch.manual_seed(0)
    config = XFormerConfig(**{**SIZES, "max_position_embeddings": 12, "position": position, **fields})
    return make_strong(kind(config).double().eval())


def combined(*parts):
    return {"type": "combined", "parts": parts}


@torch.no_grad()
@pytest.mark.parametrize("kind", [XFormerModel, XFormerForCausalLM])
@pytest.mark.parametrize("inside", INSIDE)
def test_learned_positions_beside_others(inside, kind, tmp_path):
    """As the position inside attention alone, given token vectors that hold the learned positions."""
    net, ids = model(combined({"type": "learned_absolute", "offset": 1}, inside), kind), tokens(2, 7, high=40)
    alone = model(inside, kind)
    base, single = (getattr(each, "model", each) for each in (net, alone))
    renamed = {}
    for name, tensor in net.state_dict().items():
        if "position.parts.0" not in name:
            renamed[name.replace("position.parts.1.", "position.")] = tensor
    alone.load_state_dict(renamed)
    vectors = base.trunk.embedding.tokens.weight[ids] + base.trunk.position.parts[0].table.weight[1:8]
    expected = single(inputs_embeds=vectors).last_hidden_state
    close(base(input_ids=ids).last_hidden_state, expected)
    net.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path).double()
    assert again.config.position == net.config.position
    if kind is XFormerForCausalLM:
        options = dict(max_new_tokens=4, do_sample=False, eos_token_id=-1)
        short = ids[:, :5]
        assert torch.equal(net.generate(short, **options), net.generate(short, use_cache=False, **options))


@torch.no_grad()
def test_inputs_of_all_layers():
    """Sinusoids before the first layer, a learned table before every one."""
    net = model(combined("sinusoidal_absolute", {"type": "per_layer_position", "source": "learned"}))
    ids, seen = tokens(1, 5, high=40), []
    for layer in net.trunk.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    states = net(input_ids=ids, output_hidden_states=True).hidden_states
    plain = net.trunk.position.parts[0].embed(net.trunk.embedding.tokens.weight[ids], torch.arange(5)[None])
    learned = net.trunk.position.parts[1].tables[0].weight[:5]
    close(seen[0], plain + learned)
    close(seen[1], states[1] + learned)


def test_it_can_do_what_its_parts_can():
    spec = model(combined("learned_absolute", "deberta")).config.position
    assert spec.acts == {"input", "score_terms"} and spec.shares_tables
    assert spec.max_length(XFormerConfig(max_position_embeddings=9)) == 9
    unbounded = model(combined("sinusoidal_absolute", "rotary")).config
    assert unbounded.position.max_length(unbounded) is None
    wide = {"type": "factorized", "width": 8, "narrow_positions": True}
    net = model(combined("learned_absolute", "t5_relative_bias"), embedding=wide, head="transform")
    assert net.trunk.position.parts[0].table.weight.shape == (12, 8)


def test_too_long():
    with pytest.raises(ValueError, match="has 13 tokens, but position 'combined' of this model covers 12"):
        model(combined("learned_absolute", "rotary"))(input_ids=tokens(1, 13, high=40))
