"""What configs refuse of feed-forward networks, in one sentence: a line for each."""

import pytest
from transformers import AutoConfig

REFUSED = [
    # hash_layers
    ("`intermediate_size` 16 into", dict(intermediate_size=16, feedforward={"type": "hash_layers", "multi_hash": 3})),
    ("hash='bigram'.*stack", dict(feedforward={"type": "hash_layers", "hash": "bigram"}, stack="universal")),
    # product_key_memory
    ("key_dim", dict(feedforward={"type": "product_key_memory", "key_dim": 3})),
    ("topk", dict(feedforward={"type": "product_key_memory", "num_keys": 8, "topk": 9})),
    ("topk", dict(feedforward={"type": "product_key_memory", "topk": 1})),
    ("num_keys", dict(feedforward={"type": "product_key_memory", "num_keys": 7})),
    ("layers", dict(feedforward={"type": "product_key_memory", "layers": [-1]})),
    ("activation", dict(feedforward={"type": "product_key_memory", "activation": "no"})),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_refused(case):
    message, fields, *error = case
    variant = fields.get("variant", "xformer")
    with pytest.raises(*(error or [ValueError]), match=message):
        AutoConfig.for_model(variant, **{name: value for name, value in fields.items() if name != "variant"})
