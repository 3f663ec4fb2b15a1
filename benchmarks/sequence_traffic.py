"""What a layer sends between processes that divide a text, forward and backward, by the length of the text.

    python benchmarks/sequence_traffic.py [--lengths 512,2048,8192] [--processes 4] [--only linear,delta]

Bytes are counted as they go into the exchanges of `torch.distributed` (gloo on one machine) while a model with two
layers and one with one make a training step; the difference is a layer. An exchange of n bytes between P processes
counts as what a ring sends of it: (P - 1) n for an all-gather, 2 (P - 1) / P n for an all-reduce, n from neighbor to
neighbor. The largest of all processes is given. Dense attention is not measured: its lower bound is keys and values
that are gathered once, and their gradients that are scattered once.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from measure import write_results

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, part_of_batch, sequence_parallel

WIDTH, HEADS, BYTES = 128, 2, 4  # heads of 64; what all mechanisms send grows with their number alike
WINDOW = 256  # tokens to either side of a window, of a memory, and rows of Linformer's short sequence
FLOOR = "dense, lower bound"
# attention or fields -> (fields of the config, is it a decoder)
CASES: dict[str, tuple[dict, bool]] = {
    "linear, encoder": ({"attention": "linear_transformer"}, False),
    "linear, causal": ({"attention": "linear_transformer"}, True),
    "performer, encoder": ({"attention": "performer"}, False),
    "performer, causal": ({"attention": "performer"}, True),
    "delta rule, nu 1": ({"attention": {"type": "delta_net", "nu": 1}}, True),
    "delta rule, nu 3": ({"attention": "delta_net"}, True),
    "band": ({"attention": {"type": "band_attention", "window_size": WINDOW}}, False),
    "block-local": ({"attention": {"type": "block_local_attention", "block_size": WINDOW, "blocks_before": 1}}, True),
    "longformer, 2 global tokens": ({"attention": {"type": "longformer", "attention_window": 2 * WINDOW}}, False),
    "linformer": ({"attention": {"type": "linformer", "projected_length": WINDOW}}, False),
    "transformer-xl": (
        {"attention": "transformer_xl", "stack": {"type": "segment_recurrent", "memory_length": WINDOW}},
        True,
    ),
}


@contextmanager
def counted(world: int) -> Iterator[list[float]]:
    """A list of one number: the bytes of numbers that this process sends inside the block."""
    sent, reduce, gather, swap = [0.0], dist.all_reduce, dist.all_gather, dist.batch_isend_irecv

    def count(tensor: torch.Tensor, factor: float) -> None:
        sent[0] += factor * tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0.0

    def all_reduce(tensor, *args, **kwargs):
        count(tensor, 2 * (world - 1) / world)
        return reduce(tensor, *args, **kwargs)

    def all_gather(found, tensor, *args, **kwargs):
        count(tensor, world - 1)
        return gather(found, tensor, *args, **kwargs)

    def exchange(steps):
        for step in steps:
            if step.op is dist.isend:
                count(step.tensor, 1)
        return swap(steps)

    found = {"all_reduce": all_reduce, "all_gather": all_gather, "batch_isend_irecv": exchange}
    with mock.patch.multiple(dist, **found):
        yield sent


def step_bytes(fields: dict, decoder: bool, length: int, layers: int, world: int) -> float:
    """Bytes that this process sends in a training step on one text of `length` tokens."""
    torch.manual_seed(0)
    config = XFormerConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=layers,
        intermediate_size=WIDTH,
        max_position_embeddings=length,
        position="none",
        is_decoder=decoder,
        **fields,
    )
    model = (XFormerForCausalLM if decoder else XFormerForMaskedLM)(config)
    ids = torch.randint(5, 32, (1, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    if config.attention.takes_global_tokens():
        batch["global_attention_mask"] = (torch.arange(length) % (length // 2) == 0).long()[None]
    with counted(world) as sent, sequence_parallel():
        model(**part_of_batch(batch)).loss.backward()
    return sent[0]


def work(rank: int, world: int, port: int, names: list[str], lengths: list[int], found: dict) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name in names:
        for length in lengths:
            sent = [step_bytes(*CASES[name], length, layers, world) for layers in (1, 2)]
            most = torch.tensor(sent[1] - sent[0], dtype=torch.float64)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            found[name, length] = float(most)
            if rank == 0:
                print(f"{name}, {length} tokens: {float(most) / 1024:.1f} KiB", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,8192", help="tokens of a text")
    parser.add_argument("--processes", type=int, default=4, help="that divide it")
    parser.add_argument("--only", default="", help="cases whose names contain one of these words")
    args = parser.parse_args()
    lengths, words, world = [int(each) for each in args.lengths.split(",")], args.only.split(","), args.processes
    names = [name for name in CASES if any(word in name for word in words)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with processes.Manager() as manager:
        shared = manager.dict()
        processes.start_processes(work, (world, port, names, lengths, shared), nprocs=world, start_method="fork")
        found = dict(shared)
    rows = []
    for length in lengths:
        floor = 4 * (world - 1) * -(-length // world) * WIDTH * BYTES
        for name, sent in [*((name, found[name, length]) for name in names), (FLOOR, float(floor))]:
            rows.append({"attention": name, "tokens": length, "KiB": sent / 1024, "of dense": sent / floor})
    path = write_results(
        "sequence_traffic",
        rows,
        ["attention", "tokens", "KiB", "of dense"],
        "What a layer sends where processes divide a text",
        f"One text over {world} processes, hidden {WIDTH}, {HEADS} heads, float32, forward and backward: KiB that a"
        " process sends for one layer, as a ring of processes sends them (the largest of all processes). `of dense`:"
        " ratio to the lower bound of dense attention, which gathers keys and values once and scatters their"
        f" gradients once; below 1 is less. Windows, memory and Linformer's short sequence: {WINDOW} tokens.",
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
