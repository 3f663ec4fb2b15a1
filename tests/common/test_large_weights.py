"""Contract: weights of standard deviation 1 give a finite loss and finite gradients in half precision."""

import torch

from tests.common.cases import each_component
from tests.helpers import NO_DROPOUT, VOCAB, tokens

SIZES = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}
# Where a family cannot cut 128 channels as it does.
WIDTHS = {"xf_dartsformer": {"hidden_size": 192, "intermediate_size": 192}}
# Gradients of such weights leave the range of float16, as those of a sum of squares would: as in training, the loss is
# scaled, more where they go through two towers.
LOSS_SCALE = {"encoder": 2.0**-10, "decoder": 2.0**-10, "seq2seq": 2.0**-14}


@each_component
def test_finite_in_half_precision(case):
    """float16 is the type of the smallest range: what overflows in float32 overflows in it too."""
    torch.manual_seed(0)
    sizes = SIZES | WIDTHS.get(case.name, {})
    model = case.family[case.head](case.config(initializer_range=1.0, **sizes, **NO_DROPOUT)).train().half()
    ids = tokens(2, 48, high=min(VOCAB, model.config.head.num_outputs(model.config)))
    loss = model(input_ids=ids, labels=ids).loss
    assert loss.isfinite(), loss
    (loss * LOSS_SCALE[case.shape]).backward()
    wrong = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    assert not wrong, f"gradients that are not finite: {wrong}"
