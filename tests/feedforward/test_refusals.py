"""What configs refuse of feed-forward networks, in one sentence: a line for each."""

from tests.refused_configs import refusals

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


test_refused = refusals(REFUSED)
