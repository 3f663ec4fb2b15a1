"""What configs refuse of feed-forward networks, in one sentence: a line for each."""

from tests.refused import refusals

REFUSED = [
    # hash_layers
    ("hash_layers needs `layers` >= 0", dict(feedforward={"type": "hash_layers", "layers": [-1]})),
    ("`layers` from 0 to", dict(feedforward={"type": "hash_layers", "layers": [1, 99]})),
    ("`layers` from 0 to", dict(feedforward={"type": "product_key_memory", "layers": [99]})),
    ("`intermediate_size` 16 into", dict(intermediate_size=16, feedforward={"type": "hash_layers", "multi_hash": 3})),
    ("hash='bigram'.*stack", dict(feedforward={"type": "hash_layers", "hash": "bigram"}, stack="universal")),
    # switch_transformer, sparsely_gated_moe, expert_prototyping
    ("activation", dict(feedforward={"type": "switch_transformer", "activation": "no_such"})),
    ("topk", dict(feedforward={"type": "sparsely_gated_moe", "num_experts": 4, "topk": 5})),
    ("topk", dict(feedforward={"type": "sparsely_gated_moe", "topk": 1})),
    ("num_prototypes", dict(feedforward={"type": "expert_prototyping", "num_experts": 4, "num_prototypes": 3})),
    # deepseek_moe
    ("must be whole `groups`", dict(feedforward={"type": "deepseek_moe", "num_experts": 8, "groups": 3})),
    (
        "at most all, got 2 and 3",
        dict(feedforward={"type": "deepseek_moe", "num_experts": 8, "groups": 2, "kept_groups": 3}),
    ),
    (
        "have no two best; use `group_score='best'`",
        dict(feedforward={"type": "deepseek_moe", "num_experts": 8, "groups": 8, "kept_groups": 4}),
    ),
    (
        "`topk` 5 is more than the 4 experts",
        dict(feedforward={"type": "deepseek_moe", "num_experts": 8, "groups": 2, "kept_groups": 1, "topk": 5}),
    ),
    ("give it a `shared_size`", dict(feedforward={"type": "deepseek_moe", "shared_gate": True})),
    # product_key_memory
    ("key_dim", dict(feedforward={"type": "product_key_memory", "key_dim": 3})),
    ("topk", dict(feedforward={"type": "product_key_memory", "num_keys": 8, "topk": 9})),
    ("topk", dict(feedforward={"type": "product_key_memory", "topk": 1})),
    ("num_keys", dict(feedforward={"type": "product_key_memory", "num_keys": 7})),
    ("layers", dict(feedforward={"type": "product_key_memory", "layers": [-1]})),
    ("activation", dict(feedforward={"type": "product_key_memory", "activation": "no"})),
]


test_refused = refusals(REFUSED)
