"""Attention mechanisms against dense attention and against other implementations: one layer with its projections.

python benchmarks/mechanisms.py [--lengths 2048,4096,8192] [--only "longformer;performer"] [--rounds 3] [--no-peers]

Each case is one attention sublayer (hidden 512, 8 heads, batch 1, float32), forward + backward, against dense
attention of the same geometry (scaled_dot_product_attention, causal where the case is) and against peers with the same
parameters. Ratios below 1 are faster, smaller, or less arithmetic than dense. The FLOP ratio counts matrix products;
causal dense attention counts the half that its kernel computes. Time is the median of paired rounds, memory the growth
of the peak over one step in a process of its own. Cases with peers that take gigabytes belong in runs of their own: in
a heap of that size every other step of the run is slower. Rows replace those of the same case and length in
`results/mechanisms.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from measure import forked_memory, interleaved_seconds, ratios, write_results
from peers import HEADS, WIDTH, training_step
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import initialization as init

from hf_xformers import XFormerConfig
from hf_xformers.benchmark.measure import QUIET
from hf_xformers.core.call import Call
from hf_xformers.ops.block_sparse import op as block_sparse_op
from hf_xformers.ops.bucketed import cluster_op as _cluster_op
from hf_xformers.ops.bucketed import op as _bucketed_op
from hf_xformers.position.etc_relative import TwoStreams


@dataclass(frozen=True)
class Case:
    """variant: model type; attention and position: the components; peers: makers by name, called with the length;
    fields: of the config, further ones; tokens_per_global: the text has a global token for each so many, as the stack
    of ETC gives it."""

    variant: str
    attention: Any
    causal: bool = False
    peers: dict[str, Callable] = field(default_factory=dict)
    layers: int = 1
    position: Any = "none"
    block: Any = "vanilla"
    fields: dict[str, Any] = field(default_factory=dict)
    tokens_per_global: int | None = None


CASES: dict[str, Case] = {
    "longformer, window 512": Case(
        "xf_longformer",
        {"type": "longformer", "attention_window": 512},
        peers={"transformers": peers.longformer},
    ),
    "etc, radius 84": Case("xf_etc", "etc", position="etc_relative", tokens_per_global=27),
    "bigbird, blocks of 64": Case(
        "xf_bigbird", {"type": "bigbird", "block_size": 64}, peers={"transformers": peers.big_bird}
    ),
    "sparse transformer, strided": Case(
        "xf_sparse_transformer", {"type": "sparse_transformer", "kind": "strided"}, causal=True
    ),
    "sparse transformer, fixed": Case("xf_sparse_transformer", "sparse_transformer", causal=True),
    "transient global, window 127": Case("xformer", "transient_global"),
    "band, window 512": Case("xf_gpt3_alternating", {"type": "band_attention", "window_size": 512}, causal=True),
    "diet, cascade of 512": Case(
        "xf_transformer_on_a_diet", {"type": "transformer_on_a_diet", "first_window_size": 512}, causal=True
    ),
    "diet, dilated": Case(
        "xf_transformer_on_a_diet", {"type": "transformer_on_a_diet", "diet_type": "dilated"}, causal=True, layers=4
    ),
    "diet, dilated with memory": Case(
        "xf_transformer_on_a_diet",
        {"type": "transformer_on_a_diet", "diet_type": "dilated_mem"},
        causal=True,
        layers=4,
    ),
    "multi-scale": Case("xf_multi_scale_transformer", "multi_scale_transformer", layers=3),
    "multi-scale causal": Case("xf_multi_scale_transformer", "multi_scale_transformer", causal=True, layers=3),
    "poolingformer": Case("xf_poolingformer", "poolingformer"),
    "poolingformer causal": Case("xf_poolingformer", "poolingformer", causal=True),
    "reformer, 1 hash": Case(
        "xf_reformer",
        {"type": "reformer", "num_hashes": 1},
        peers={
            "transformers": peers.reformer,
            "reformer-pytorch": peers.reformer_pytorch,
            "pytorch-fast-transformers": peers.fast_reformer,
        },
    ),
    "reformer, 4 hashes": Case(
        "xf_reformer",
        {"type": "reformer", "num_hashes": 4},
        peers={
            "transformers": partial(peers.reformer, hashes=4),
            "reformer-pytorch": partial(peers.reformer_pytorch, hashes=4),
            "pytorch-fast-transformers": partial(peers.fast_reformer, hashes=4),
        },
    ),
    "reformer causal, 1 hash": Case(
        "xf_reformer",
        {"type": "reformer", "num_hashes": 1},
        causal=True,
        peers={
            "transformers": partial(peers.reformer, causal=True),
            "reformer-pytorch": partial(peers.reformer_pytorch, causal=True),
            "pytorch-fast-transformers": partial(peers.fast_reformer, causal=True),
        },
    ),
    "routing, window 128": Case(
        "xf_routing_transformer",
        {"type": "routing_transformer", "window_size": 128, "num_clusters": "T/128", "num_routing_heads": HEADS},
        peers={"routing-transformer": peers.routing_transformer},
    ),
    "routing causal, window 128": Case(
        "xf_routing_transformer",
        {"type": "routing_transformer", "window_size": 128, "num_clusters": "T/128", "num_routing_heads": HEADS},
        causal=True,
        peers={"routing-transformer": partial(peers.routing_transformer, causal=True)},
    ),
    "linear": Case(
        "xf_linear_transformer",
        "linear_transformer",
        peers={
            "linear-attention-transformer": peers.linear_attention_transformer,
            "pytorch-fast-transformers": partial(
                peers.fast_transformers, attention="LinearAttention", query_dimensions=peers.HEAD_WIDTH
            ),
        },
    ),
    "linear causal": Case(
        "xf_linear_transformer",
        "linear_transformer",
        causal=True,
        peers={
            "linear-attention-transformer": partial(peers.linear_attention_transformer, causal=True),
            "pytorch-fast-transformers": partial(
                peers.fast_transformers,
                attention="CausalLinearAttention",
                causal=True,
                query_dimensions=peers.HEAD_WIDTH,
            ),
        },
    ),
    "performer, 256 features": Case(
        "xf_performer",
        {"type": "performer", "num_features": 256},
        peers={"performer-pytorch": peers.performer_pytorch},
    ),
    "performer causal, 256 features": Case(
        "xf_performer",
        {"type": "performer", "num_features": 256},
        causal=True,
        peers={
            "performer-pytorch": partial(peers.performer_pytorch, causal=True),
            "performer-pytorch, C++": partial(peers.performer_pytorch, causal=True, product="c++"),
        },
    ),
    "performer v1, 256 rows": Case("xf_performer_v1", {"type": "performer", "feature_kind": "trigonometric"}),
    "performer v1 causal, 256 rows": Case(
        "xf_performer_v1", {"type": "performer", "feature_kind": "trigonometric"}, causal=True
    ),
    "arc-cosine, 256 features": Case("xf_arccos_attention", "arccos_attention"),
    "arc-cosine causal, 256 features": Case("xf_arccos_attention", "arccos_attention", causal=True),
    "rfa, 64 rows": Case("xf_rfa", "rfa"),
    "rfa causal, 64 rows": Case("xf_rfa", "rfa", causal=True),
    "rfa gated, 64 rows": Case("xf_rfa", {"type": "rfa", "gate": True}, causal=True),
    "dpfp, 3 shifts": Case("xf_dpfp", "dpfp"),
    "dpfp causal, 3 shifts": Case("xf_dpfp", "dpfp", causal=True),
    "delta net": Case("xf_delta_net", "delta_net", causal=True),
    "delta net, normalized": Case("xf_delta_net", {"type": "delta_net", "attention_normalize": True}, causal=True),
    "linformer, k 256": Case(
        "xf_linformer", {"type": "linformer", "projected_length": 256}, peers={"linformer": peers.linformer}
    ),
    "nystromformer, 64 landmarks": Case(
        "xf_nystromformer",
        {"type": "nystromformer", "num_landmarks": 64},
        peers={"transformers": peers.nystromformer, "nystrom-attention": peers.nystrom_attention},
    ),
    "csalr, 64 landmarks": Case("xf_csalr", {"type": "csalr", "num_landmarks": 64}),
    "star transformer": Case("xf_star_transformer", "star_transformer", layers=2),
    "axial encoder": Case("xf_axial_transformer", "axial_transformer", layers=2),
    "image transformer 1d": Case("xf_image_transformer", "image_transformer", causal=True),
    "image transformer 2d": Case("xf_image_transformer", {"type": "image_transformer", "local": "2d"}, causal=True),
    "memory-compressed, local layer": Case(
        "xf_memory_compressed_attention", {"type": "memory_compressed_attention", "layer_pattern": "L"}, causal=True
    ),
    "memory-compressed, compressed layer": Case(
        "xf_memory_compressed_attention", {"type": "memory_compressed_attention", "layer_pattern": "M"}, causal=True
    ),
    "memory-compressed, compressed layer of an encoder": Case(
        "xf_memory_compressed_attention",
        {"type": "memory_compressed_attention", "layer_pattern": "M"},
        peers={"memory-compressed-attention": peers.memory_compressed_attention},
    ),
    "set transformer, 32 points": Case("xf_set_transformer", "set_transformer"),
    "clustered, 100 clusters": Case("xf_clustered_attention", "clustered_attention"),
    "improved clustered, 100 clusters": Case("xf_improved_clustered_attention", "improved_clustered_attention"),
    "informer, factor 5": Case("xf_informer", "informer"),
    "low rank 16 and band 3": Case("xf_low_rank_band", "low_rank_band"),
    "low rank 16 and band 3, causal": Case("xf_low_rank_band", "low_rank_band", causal=True),
    "luna": Case("xf_luna", "luna"),
    "luna causal": Case("xf_luna", "luna", causal=True),
    "adaptive span 512": Case("xf_adaptive_span", {"type": "adaptive_span", "start": "480/T"}, causal=True),
    "transformer-xl": Case("xf_transformer_xl", "transformer_xl", causal=True, peers={"transformers": peers.xlnet}),
    "tener": Case("xf_tener", "tener"),
    "realformer, 4 layers": Case("xf_realformer", "realformer", layers=4),
    "talking heads": Case("xf_talking_heads", "talking_heads", peers={"x-transformers": peers.talking_heads}),
    "collaborative attention": Case("xf_collaborative_attention", "collaborative_attention"),
    "collaborative attention, half the width": Case(
        "xf_collaborative_attention", {"type": "collaborative_attention", "shared_width": WIDTH // 2}
    ),
    "ca-mtl": Case("xf_ca_mtl", "ca_mtl"),
    "routing aggregation": Case(
        "xf_routing_aggregation", {"type": "dense", "aggregation": "routing_aggregation"}, layers=2
    ),
    "disagreement of outputs": Case(
        "xf_disagreement_regularization", {"type": "dense", "losses": ["disagreement_regularization"]}
    ),
    "attention guidance": Case("xf_attention_guidance", {"type": "dense", "losses": ["attention_guidance"]}),
    "multi-query": Case("xf_multi_query_attention", "dense", fields={"num_key_value_heads": 1}),
    "capsule heads": Case("xf_capsule_heads", {"type": "dense", "aggregation": "capsule_heads"}),
    "bp transformer": Case("xf_bp_transformer", "bp_transformer", block="bp_transformer"),
    "bp transformer causal": Case("xf_bp_transformer", "bp_transformer", causal=True, block="bp_transformer"),
    "Sinkhorn": Case("xf_sinkhorn_transformer", "sinkhorn_transformer"),
    "Sinkhorn, causal": Case("xf_sinkhorn_transformer", "sinkhorn_transformer", causal=True),
    "sac, 10 edges": Case("xf_sac", "sac"),
    "sac, 10 edges within 256": Case("xf_sac", {"type": "sac", "candidate_window": 256}),
    "sac causal, 10 edges": Case("xf_sac", "sac", causal=True),
    "adaptively sparse": Case("xf_adaptively_sparse_transformer", "adaptively_sparse"),
    "adaptively sparse, alpha 1.5": Case(
        "xf_adaptively_sparse_transformer", {"type": "adaptively_sparse", "alpha": 1.5}
    ),
    "dense synthesizer": Case("xf_synthesizer", {"type": "synthesizer", "kind": "dense"}),
    "random synthesizer": Case("xf_synthesizer", {"type": "synthesizer", "kind": "random"}),
    "gaussian prior": Case("xf_gaussian_transformer", "dense", position="gaussian_transformer"),
    "gaussian prior causal": Case("xf_gaussian_transformer", "dense", causal=True, position="gaussian_transformer"),
    "dynamic masks": Case("xf_mask_attention_network", "dynamic_mask"),
    "localness": Case("xf_localness", {"type": "localness", "layers": 1}),
    "hard-coded gaussian": Case("xf_hard_coded_gaussian", "hard_coded_gaussian"),
    "hard-coded gaussian causal": Case("xf_hard_coded_gaussian", "hard_coded_gaussian", causal=True),
    "average attention": Case("xf_average_attention", {"type": "average_attention", "ffn_size": 2048}, causal=True),
    "lazyformer, 4 layers": Case("xf_lazyformer", {"type": "lazyformer", "block_size": 2}, layers=4),
    "evolving attention, 4 layers": Case("xf_predictive_attention", "predictive_attention", layers=4),
}


# Their own kernels multiply where no counter sees it.
COUNTED_ELSEWHERE = ("pytorch-fast-transformers", "performer-pytorch, C++")


def resolved(attention: Any, length: int) -> Any:
    """Fields that depend on the length, written as quotients with T."""
    if not isinstance(attention, dict):
        return attention
    made = {}
    for key, value in attention.items():
        if isinstance(value, str) and value.startswith("T/"):
            value = max(length // int(value[2:]), 1)
        elif isinstance(value, str) and value.endswith("/T"):
            value = min(int(value[:-2]) / length, 1.0)
        made[key] = value
    return made


def ours(
    attention: Any,
    causal: bool,
    layers: int,
    length: int,
    position: Any = "none",
    block: Any = "vanilla",
    fields: dict[str, Any] | None = None,
    tokens_per_global: int | None = None,
) -> Callable[[], None]:
    """Forward and backward of `layers` attention sublayers with residual sums, and of their auxiliary losses."""
    torch.manual_seed(0)
    config = XFormerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        max_position_embeddings=length,
        attention_probs_dropout_prob=0.0,
        attention=resolved(attention, length),
        position=position,
        block=block,
        is_decoder=causal,
        **({} if tokens_per_global is None else {"stack": "etc"}),
        **(fields or {}),
    )
    modules = nn.ModuleList(config.attention.build(config, layer_idx=index) for index in range(layers))
    for module in modules.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    for module in modules.modules():
        if hasattr(module, "initialize"):
            module.initialize(config, init)
    summaries = 0 if tokens_per_global is None else -(-length // tokens_per_global)
    states, index = torch.randn(1, length + summaries, WIDTH), torch.arange(length + summaries)

    def run() -> None:
        context = Call(None, index[None], index, index, causal=causal, fresh=True)
        if tokens_per_global is not None:
            part, number = torch.arange(length) // tokens_per_global, torch.arange(summaries)
            layout = (index >= length, torch.cat([index[:length], number]), torch.cat([part, number]))
            context.keep(TwoStreams(*(x[None] for x in layout)))
            context.inputs = {"global_attention_mask": layout[0][None], "max_global_tokens": summaries}
        hidden, losses = states, states.new_zeros(())
        for module in modules:
            module.prepare(context, None)
        between = dict(context.states)
        for module in modules:
            result = module(hidden, context.passing(between))
            hidden = hidden + result.output
            between = {**between, **(result.states or {})}
            losses = losses + sum(loss.sum() for loss in (result.aux_losses or {}).values())
        (hidden.sum() + losses).backward()
        modules.zero_grad(set_to_none=True)

    return run


def make(name: str, length: int) -> Callable[[], None]:
    """The step of a case, of `dense` / `dense causal` (`x4`: four layers), or of `case | peer`."""
    if name.startswith("dense|"):
        _, causal, layers = name.split("|")
        return ours("dense", causal == "causal", int(layers), length)
    case, _, peer = name.partition(" | ")
    if peer:
        return training_step(CASES[case].peers[peer](length), length, residual=True)
    entry = CASES[case]
    where = (entry.position, entry.block, entry.fields, entry.tokens_per_global)
    return ours(entry.attention, entry.causal, entry.layers, length, *where)


def baseline(case: Case) -> str:
    return f"dense|{'causal' if case.causal else 'full'}|{case.layers}"


def sdpa_flops(query, key, value, *args, out_shape=None, backward: bool = False, **kwargs) -> int:
    """Matrix products of SDPA's CPU kernel: two forward, five backward; causal ones compute half."""
    causal = any(argument is True for argument in args) or kwargs.get("is_causal", False)
    batch, heads, queries, width = query
    total = 2 * batch * heads * queries * key[-2] * width * (5 if backward else 2)
    return total // 2 if causal else total


def added_product_flops(target, one, other, *args, out_shape=None, **kwargs) -> int:
    """Of one @ other, added to the target in place."""
    return 2 * math.prod(one) * other[-1]


def counted_inside(implementation: Callable) -> Callable[..., int]:
    """A formula for one of our operators: what its own code multiplies, by running it once more."""

    def formula(*args, out_val=None, **kwargs) -> int:
        with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
            implementation(*args, **kwargs)
        return counter.get_total_flops()

    formula._get_raw = True
    return formula


def formulas() -> dict[Any, Callable[..., int]]:
    """Operators that torch's counter does not know."""
    aten, own = torch.ops.aten, torch.ops.hf_xformers
    return {
        aten.addmm_: added_product_flops,
        aten.baddbmm_: added_product_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, query, key, value, *args, **kwargs: (
            sdpa_flops(query, key, value, *args, backward=True, **kwargs)
        ),
        own.block_sparse: counted_inside(block_sparse_op._forward),
        own.block_sparse_backward: counted_inside(block_sparse_op._backward),
        own.bucketed: counted_inside(_bucketed_op._forward),
        own.bucketed_backward: counted_inside(_bucketed_op._backward),
        own.clusters: counted_inside(_cluster_op._forward),
        own.clusters_backward: counted_inside(_cluster_op._backward),
    }


class NoModules:
    """Stands for the counter's tracker of modules, which fails where one runs without gradients inside another."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def flops(step: Callable[[], None]) -> int:
    """Of one forward and backward."""
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    counter.mod_tracker = NoModules()
    with counter:
        step()
    return counter.get_total_flops()


def measure_memory(names: list[str], length: int, with_peers: bool) -> dict[str, int]:
    """Bytes of every step that runs: of the cases, their baselines and peers."""
    everything = list(dict.fromkeys(baseline(CASES[name]) for name in names)) + names
    if with_peers:
        everything += [f"{name} | {peer}" for name in names for peer in CASES[name].peers]
    memory = {}
    for name in everything:
        try:
            memory[name] = forked_memory(make, name, length)
        except RuntimeError as error:
            print(f"{name} at {length}: {error}", flush=True)
    return memory


def measure(
    names: list[str], length: int, rounds: int, with_peers: bool, memory: dict[str, int]
) -> list[dict[str, Any]]:
    steps = {name: make(name, length) for name in memory}
    seconds = interleaved_seconds(steps, rounds)
    rows = []
    for name in names:
        case, dense = CASES[name], baseline(CASES[name])
        if name not in steps:
            continue
        relative = ratios(seconds, dense)
        row: dict[str, Any] = {
            "variant": case.variant,
            "case": name,
            "T": length,
            "time ratio": relative[name],
            "FLOP ratio": flops(steps[name]) / flops(steps[dense]),
            "memory ratio": memory[name] / memory[dense],
            "peak MiB": memory[name] / 2**20,
            "others busy": seconds.others_busy,
            "ms": 1000 * sorted(seconds[name])[len(seconds[name]) // 2],
        }
        found = [peer for peer in case.peers if f"{name} | {peer}" in steps]
        if with_peers and len(found) < len(case.peers):  # its best peer may be among those that did not run
            row["without"] = sorted(set(case.peers) - set(found))
        if found and with_peers:
            best = min(found, key=lambda peer: relative[f"{name} | {peer}"])
            row["best peer"] = best
            row["peer time ratio"] = relative[f"{name} | {best}"]
            row["peer memory ratio"] = min(memory[f"{name} | {peer}"] for peer in found) / memory[dense]
            row["time / peer"] = row["time ratio"] / row["peer time ratio"]
            row["memory / peer"] = row["memory ratio"] / row["peer memory ratio"]
            if best not in COUNTED_ELSEWHERE:
                row["FLOPs / peer"] = flops(steps[name]) / flops(steps[f"{name} | {best}"])
        rows.append(row)
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
    return rows


def busy(rows: list[dict[str, Any]], names: list[str], length: int) -> list[str]:
    """Which of these cases have a row at this length that was measured next to other work, as far as it says."""
    most = QUIET * (os.cpu_count() or 1)
    found = {row["case"] for row in rows if row["T"] == length and row.get("others busy", math.inf) > most}
    return [name for name in names if name in found]


COLUMNS = [
    "variant",
    "case",
    "T",
    "time ratio",
    "FLOP ratio",
    "memory ratio",
    "ms",
    "peak MiB",
    "best peer",
    "peer time ratio",
    "peer memory ratio",
    "time / peer",
    "FLOPs / peer",
    "memory / peer",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,4096,8192")
    parser.add_argument("--only", default="", help="parts of case names, separated by semicolons")
    parser.add_argument("--busy", action="store_true", help="only rows that were measured next to other work")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    wanted = [part.strip() for part in arguments.only.split(";") if part.strip()]
    names = [name for name in CASES if not wanted or any(part in name for part in wanted)]
    stored = Path(__file__).parent / "results" / "mechanisms.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    lengths, with_peers = [int(length) for length in arguments.lengths.split(",")], not arguments.no_peers
    # Memory first: a process that has run a backward pass cannot be forked safely, and its heap is no longer its own.
    chosen = {length: busy(rows, names, length) if arguments.busy else names for length in lengths}
    memory = {length: measure_memory(chosen[length], length, with_peers) for length in lengths}
    for length in lengths:
        new = measure(chosen[length], length, arguments.rounds, with_peers, memory[length])
        replaced = {(row["case"], row["T"]) for row in new}
        rows = [row for row in rows if (row["case"], row["T"]) not in replaced] + new
        order = list(CASES)
        rows.sort(key=lambda row: (order.index(row["case"]) if row["case"] in order else -1, row["T"]))
        note = (
            "One attention sublayer with its projections, hidden 512, 8 heads, batch 1, forward + backward. Ratios to"
            " dense attention (SDPA) of the same geometry, causal where the case is; peers with the same parameters,"
            " the best by time and the best by memory. What takes more than 1.5 times what its FLOP ratio says"
            " (Reformer with several hashes or at 16384, BigBird at 16384, Transformer-XL at 8192, talking heads,"
            " random Synthesizer, ETC, Informer, improved clustered) gathers, sorts or reads tables, which are no"
            " FLOPs, adds a bias or gate to every score (dynamic masks, CA-MTL, TENER), finds a threshold for each row"
            " (alpha-entmax), picks one edge after another with an LSTM (SAC), multiplies channels to features"
            " (DPFP), or goes from"
            " chunk to chunk (delta rule; normalized, three times: for the sums that keys and queries are divided by"
            " and for the state, with features made anew each time). What takes over 1.5 times the memory keeps scores"
            " of all pairs, a table of all pairs of places and its gradient (CA-MTL), queries, keys and values of two"
            " levels (Poolingformer), features times width numbers for each segment of the text (Performer v1 and DPFP"
            " in decoders), nodes of a tree, twice as many as tokens (BP-Transformer), labels, gathered keys and"
            " weights of a whole head (ETC), or the hidden layer of a network (average attention). FLOPs / peer is the"
            " arithmetic that either really does: most of it are the projections, which both have, so that half of a"
            " peer's time is out of reach where it is above a half."
        )
        write_results("mechanisms", rows, COLUMNS, "Attention mechanisms against dense attention and peers", note)


if __name__ == "__main__":
    main()
