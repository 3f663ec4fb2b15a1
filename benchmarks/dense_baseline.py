"""The dense baseline against transformers' own: forward + backward of whole models of equal size.

python benchmarks/dense_baseline.py [--lengths 128,512,2048] [--rounds 9]
"""

from __future__ import annotations

import argparse

import torch
from measure import interleaved_seconds, memory_in_fresh_process, ratios, write_results
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

import hf_xformers  # noqa: F401  (registers the variants)
from hf_xformers import XFBertConfig, XFBertModel, XFGPT2Config, XFGPT2Model

SIZE = {"vocab_size": 1000, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAYERS, WIDTH, HEADS = 2, 512, 8
PAIRS = {"xf_bert": "BertModel(sdpa)", "xf_gpt2": "GPT2Model(sdpa)"}


def build(name: str, length: int):
    torch.manual_seed(0)
    ours = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": length,
        **SIZE,
    }
    if name == "xf_bert":
        return XFBertModel(XFBertConfig(**ours))
    if name == "xf_gpt2":
        return XFGPT2Model(XFGPT2Config(**ours, use_cache=False, bos_token_id=None, eos_token_id=None))
    if name == "BertModel(sdpa)":
        return BertModel(BertConfig(**ours, attn_implementation="sdpa"))
    return GPT2Model(
        GPT2Config(
            vocab_size=1000,
            bos_token_id=None,
            eos_token_id=None,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=length,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def step(name: str, length: int):
    """A callable that runs forward and backward on one row of `length` tokens."""
    model = build(name, length).train()
    ids = torch.randint(5, 1000, (1, length))
    mask = torch.ones_like(ids)

    def run():
        model(input_ids=ids, attention_mask=mask).last_hidden_state.sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="128,512,2048")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows = []
    for ours, theirs in PAIRS.items():
        for length in map(int, arguments.lengths.split(",")):
            seconds = interleaved_seconds({ours: step(ours, length), theirs: step(theirs, length)}, arguments.rounds)
            memory = {name: memory_in_fresh_process(step, name, length) for name in (ours, theirs)}
            row = {"model": ours, "against": theirs, "T": length}
            row["time ratio"] = ratios(seconds, theirs)[ours]
            row["memory ratio"] = memory[ours] / memory[theirs]
            row["ms"] = 1000 * sorted(seconds[ours])[len(seconds[ours]) // 2]
            row |= {"peak MiB": memory[ours] / 2**20, "others busy": seconds.others_busy}
            rows.append(row)
            print(row, flush=True)
    columns = ["model", "against", "T", "time ratio", "memory ratio", "ms", "peak MiB", "others busy"]
    note = f"{LAYERS} layers, hidden {WIDTH}, {HEADS} heads, batch 1, forward + backward, attention mask given."
    print(write_results("dense_baseline", rows, columns, "Dense baseline against transformers", note))


if __name__ == "__main__":
    main()
