"""Feed-forward components against a dense feed-forward and against other implementations: the sublayer alone.

python benchmarks/feedforwards.py [--lengths 512,2048,4096,8192] [--rounds 5] [--only switch] [--no-peers]

Each case is one sublayer (hidden 512, inner width 2048, batch 1, float32), forward + backward, against `relu` of the
same widths. Ratios below 1 are faster or smaller. Memory is the growth of the peak over one step in a process of its
own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from measure import forked_memory, interleaved_seconds, ratios, write_results
from torch import nn
from transformers import initialization as init

from hf_xformers import XFormerConfig

WIDTH, INNER = 512, 2048
CASES: dict[str, tuple[str, Any]] = {  # name -> variant, feed-forward
    "switch, 8 experts": ("xf_switch_transformer", {"type": "switch_transformer", "num_experts": 8, "every": 1}),
    "switch, 16 experts": ("xf_switch_transformer", {"type": "switch_transformer", "num_experts": 16, "every": 1}),
    "gshard, 8 experts": ("xf_gshard_moe", {"type": "gshard_moe", "num_experts": 8, "every": 1}),
    "product keys": (
        "xf_product_key_memory",
        {"type": "product_key_memory", "num_keys": 128, "topk": 32, "key_dim": 128},
    ),
}
PEERS = {"switch, 8 experts": "transformers' SwitchTransformers", "product keys": "product-key-memory"}


def ours(feedforward: Any) -> nn.Module:
    config = XFormerConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=8, feedforward=feedforward
    )
    module = config.feedforward.build(config, layer_idx=0)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
    for part in module.modules():
        if hasattr(part, "initialize"):
            part.initialize(config, init)
    return module


def peer(name: str) -> nn.Module:
    if name == "product keys":
        from product_key_memory import PKM

        return PKM(WIDTH, heads=4, num_keys=128, topk=32, dim_head=128)
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = SwitchTransformersConfig(d_model=WIDTH, d_ff=INNER, num_experts=8, expert_capacity=10**6)
    return SwitchTransformersSparseMLP(config)


def make(name: str, length: int) -> Callable[[], None]:
    torch.manual_seed(0)
    case, _, other = name.partition(" | ")
    module = peer(case) if other else ours("relu" if case == "dense" else CASES[case][1])
    module.train()
    states = torch.randn(1, length, WIDTH)

    def run() -> None:
        output = module(states) if other else module(states, None).output
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        module.zero_grad(set_to_none=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    everything = ["dense", *names]
    everything += [] if arguments.no_peers else [f"{name} | peer" for name in names if name in PEERS]
    lengths = [int(length) for length in arguments.lengths.split(",")]
    # Memory first: a process that has run a backward pass cannot be forked safely.
    memory = {(name, length): forked_memory(make, name, length) for length in lengths for name in everything}
    rows = []
    for length in lengths:
        seconds = interleaved_seconds({name: make(name, length) for name in everything}, arguments.rounds)
        relative = ratios(seconds, "dense")
        for name in names:
            row: dict[str, Any] = {
                "variant": CASES[name][0],
                "case": name,
                "T": length,
                "time ratio": relative[name],
                "memory ratio": memory[name, length] / memory["dense", length],
                "others busy": seconds.others_busy,
            }
            if (other := f"{name} | peer") in relative:
                row["peer"] = PEERS[name]
                row["peer time ratio"] = relative[other]
                row["peer memory ratio"] = memory[other, length] / memory["dense", length]
            rows.append(row)
            print(row, flush=True)
    note = (
        "One feed-forward sublayer, hidden 512, inner width 2048, batch 1, forward + backward, against a dense one"
        " with ReLU. Product keys replace it by 4 heads of 128 x 128 keys and 32 read values."
    )
    columns = ["variant", "case", "T", "time ratio", "memory ratio", "peer", "peer time ratio", "peer memory ratio"]
    write_results("feedforwards", rows, columns, "Feed-forward components against dense ones", note)


if __name__ == "__main__":
    main()
