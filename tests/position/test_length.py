"""Four times the training length: positions that say they extrapolate work there, the others refuse in one
sentence."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from tests.helpers import close, make_strong, pad, tokens
from tests.position.test_matrix import ROWS, SIZES

TRAINED = 8
# The input-level order of one embedding, beside the positions and blocks of the matrix.
CASES = {**ROWS, "complex_order": {"embedding": "complex_order", "attention": "complex_order", "position": "none"}}
LIMITED = {"axial", "learned_absolute", "tupe", "tupe_absolute", "per_layer_position", "combined"}


def models(fields):
    """The encoder and the decoder that a case can be."""
    extra = {"tie_word_embeddings": False, "normalization": "complex_parts"} if "embedding" in fields else {}
    extra |= {"residual": "post_ln", "feedforward": "complex_parts", "head": "linear"} if extra else {}
    found = []
    for kind, causal in ((XFormerForMaskedLM, False), (XFormerForCausalLM, True)):
        try:
            config = XFormerConfig(
                **{**SIZES, **extra, **fields, "max_position_embeddings": TRAINED, "is_decoder": causal}
            )
        except ValueError as error:
            assert "causal" in str(error) or "decoder" in str(error), error
            continue
        torch.manual_seed(0)
        found.append(make_strong(kind(config).eval()))
    assert found
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_four_times_as_long(name):
    ids, mask = pad([tokens(4 * TRAINED), tokens(TRAINED, seed=1)], 4 * TRAINED, "left")
    short = {"input_ids": ids[1:, -TRAINED:], "attention_mask": mask[1:, -TRAINED:]}
    for model in models(CASES[name]):
        position = model.config.position
        assert (position.max_length(model.config) is None) == (name not in LIMITED)
        alone = model(**short).logits  # the trained length always fits
        if name in LIMITED:
            with pytest.raises(
                ValueError,
                match=f"has {4 * TRAINED} tokens, but position '{position.type}'.* covers {TRAINED}.*rotary",
            ):
                model(input_ids=ids, attention_mask=mask)
            continue
        logits = model(input_ids=ids, attention_mask=mask).logits
        assert logits.isfinite().all()
        close(logits[1, -TRAINED:], alone[0], 2e-5)  # a row of the trained length does not see how long others are
        # places beyond the trained length still differ (one layer of `indigo` knows left from right alone)
        if name not in ("none", "indigo"):
            swapped = ids.clone()
            swapped[0, [-3, -2]] = ids[0, [-2, -3]]
            assert (model(input_ids=swapped, attention_mask=mask).logits[0, -1] - logits[0, -1]).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES if name not in LIMITED])
def test_decoding_goes_on(name):
    """Token by token with a cache, beyond the trained length, as the whole text at once."""
    decoders = [model for model in models(CASES[name]) if model.config.is_decoder]
    for model in decoders:
        ids = tokens(1, 2 * TRAINED)
        cache, steps = None, []
        for t in range(2 * TRAINED):
            output = model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
        close(torch.cat(steps, 1), model(input_ids=ids).logits, 2e-5)
