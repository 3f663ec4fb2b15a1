"""A bias that offers nothing but [`ScoreBias.block`], in every mechanism that has a place for one."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.core.components import SLOTS, names, register
from hf_xformers.position.base import Position, PositionSpec, ScoreBias
from tests.helpers import close, make_strong, tokens

SIZES = dict(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=64,
)
SMALL = {
    "longformer": {"attention_window": 8},
    "bigbird": {"block_size": 4},
    "reformer": {"num_buckets": 4, "chunk_length": 4},
    "routing_transformer": {"num_clusters": 3, "window_size": 5, "block_size": 4},
    "adaptive_span": {"max_span": 16},
}
TAKERS = [name for name in names("attention") if "score_bias" in SLOTS["attention"].get(name).acts]


class Checkered(Position, ScoreBias):
    """b[h, i mod 3, j mod 5]: no function of the distance."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(torch.randn(config.num_attention_heads, 3, 5))

    def score_bias(self):
        return self

    def block(self, query_index, key_index):
        pairs = self.table[:, (query_index % 3).unsqueeze(-1), (key_index % 5).unsqueeze(-2)]
        return pairs.movedim(0, -3)


@pytest.fixture
def checkered():
    @register("position", "checkered")
    class CheckeredSpec(PositionSpec):
        acts = frozenset({"score_bias"})

        def build(self, config, **where):
            return Checkered(config)

    yield CheckeredSpec
    del SLOTS["position"]._specs["checkered"]


def run(model, ids, implementation):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    output = model(ids).last_hidden_state
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    return output.detach(), model.trunk.position.table.grad.clone()


@pytest.mark.parametrize("causal", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize("attention", TAKERS)
def test_block_is_enough(attention, causal, checkered):
    """The fast path gives the literal path's output and the bias's gradient."""
    spec = SLOTS["attention"].get(attention)
    if "causal" in spec.why_not if causal else not spec.bidirectional:
        pytest.skip("it has no such form")
    given = {"type": attention, **SMALL.get(attention, {})}
    stack = {"stack": "conditional_computation"} if attention == "conditional" else {}
    torch.manual_seed(0)
    if attention == "axial_transformer":
        stack = {"stack": "axial_transformer", "num_hidden_layers": 3}
    config = XFormerConfig(**{**SIZES, "attention": given, "position": "checkered", "is_decoder": causal, **stack})
    model = make_strong(XFormerModel(config).double().eval(), amount=0.3)
    ids = tokens(2, 41, high=50)
    expected, found = run(model, ids, "eager"), run(model, ids, "sdpa")
    for one, other in zip(found, expected):
        close(one, other, 1e-8)
    with torch.no_grad():
        model.trunk.position.table.zero_()
        assert (model(ids).last_hidden_state - expected[0]).abs().max() > 1e-3
    if attention != "adaptively_sparse":  # whose weights may be zero, and take nothing of a change then
        assert expected[1].abs().min() > 0


def test_default_by_distance():
    """A relative bias is told by its blocks."""

    class Slope(ScoreBias):
        relative = True

        def block(self, query_index, key_index):
            distance = key_index.unsqueeze(-2) - query_index.unsqueeze(-1)
            return torch.stack([distance, -2 * distance], dim=-3).double()

    distance = torch.tensor([[-3, 0], [2, 5]])
    assert torch.equal(Slope().by_distance(distance), torch.stack([distance, -2 * distance]).double())
    with pytest.raises(TypeError, match="abstract method"):
        ScoreBias()


def test_something_else_is_refused(checkered, monkeypatch):
    monkeypatch.setattr(Checkered, "score_bias", lambda self: nn.Identity())
    with pytest.raises(TypeError, match=r"position 'checkered' .* gives a Identity; give a `.*ScoreBias`"):
        XFormerModel(XFormerConfig(**SIZES, position="checkered"))
