"""ProbSparse attention: how many queries, which sample of keys, and transformers' module."""

import pytest
import torch

from hf_xformers.ops.prob_sparse import budget, budgets, sampled_keys
from tests.attention.references.compressed import sample_by_hand
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close


def test_budgets():
    counts = torch.tensor([0, 1, 2, 3, 7, 8, 20, 21, 128, 512, 2048, 4096])
    assert budgets(counts, 5).tolist() == [budget(int(n), 5) for n in counts]
    assert [budget(n, 5) for n in (128, 512, 2048, 4096)] == [25, 35, 40, 45]


def test_sample_is_uniform():
    """Counts of 40 000 draws among 20 keys: chi square with 19 degrees of freedom, mean 19, deviation 6.2."""
    drawn = sampled_keys(torch.arange(1000), 40, torch.full((1000,), 20), 7)
    counts = torch.bincount(drawn.flatten(), minlength=20).double()
    assert len(counts) == 20 and ((counts - 2000) ** 2 / 2000).sum() < 45
    assert drawn.tolist()[3] == sample_by_hand(3, 40, 20, 7)


@pytest.mark.parametrize("masked", [False, True])
def test_transformers_module(masked, monkeypatch):
    """transformers' module with the same weights, where it samples every key once: u of all queries attend. It counts
    ceil(ln(1 + n)), which is ours at n = 20, and adds up context in float32."""
    from transformers.models.informer import modeling_informer as theirs

    monkeypatch.setattr(torch, "randint", lambda low, high, shape: torch.arange(shape[0]))
    spec = {"type": "informer", "sampling_factor": 2, "causal_form": "paper"}
    (layer,) = build_layers(spec, causal=masked, use_cache=False)
    twin = theirs.InformerProbSparseAttention(WIDTH, HEADS, is_decoder=masked, sampling_factor=2).double().eval()
    weights = {name.replace("o_proj", "out_proj"): weight for name, weight in layer.state_dict().items()}
    twin.load_state_dict(weights)
    x = vectors(2, 19)
    mask = torch.full((19, 19), -1e30).double().triu(1).expand(2, 1, -1, -1) if masked else None
    expected, _ = twin(x, attention_mask=mask)

    def all_keys(query, key, mask, factor, seed):
        scores = query @ key.mT
        return scores.amax(-1) - scores.sum(-1) / key.shape[2]

    monkeypatch.setattr("hf_xformers.attention.informer.measured", all_keys)
    (found,) = run_layers([layer], x, make_context(19, masked))
    close(found.output, expected, 1e-6 if masked else 1e-9)
