"""Time of an encoder on padded batches, with and without `unpad_inputs`.

    python benchmarks/padding_removal.py --variant bert --fill 0.5 --length 256 --batch 16

Lengths are spread evenly such that `fill` of the slots are real tokens. Prints one line per path and their ratio;
both paths are run on the same batch, alternately, and the median of `--repeats` runs counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import hf_xformers  # noqa: F401  (registers the variants)


def batch(rows: int, length: int, fill: float, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [rows, length]; lengths spread evenly around `fill`, the longest as far above as the shortest
    below."""
    spread = min(fill, 1 - fill)
    lengths = torch.linspace(fill - spread, fill + spread, rows).mul(length).round().clamp(1, length)
    mask = (torch.arange(length) < lengths[:, None]).long()
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, vocab, (rows, length), generator=generator) * mask, mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="bert")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--fill", type=float, default=0.5, help="share of slots that hold real tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        f"xf_{given.variant}",
        vocab_size=1000,
        hidden_size=given.hidden_size,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden_size // 64,
        intermediate_size=4 * given.hidden_size,
        max_position_embeddings=given.length,
        unpad_inputs=True,  # refused here if the variant cannot
    )
    model = AutoModelForMaskedLM.from_config(config).eval().to(given.device).base_model
    ids, mask = (tensor.to(given.device) for tensor in batch(given.batch, given.length, given.fill, 1000))
    times: dict[bool, list[float]] = {False: [], True: []}
    states = {}
    with torch.inference_mode():
        for repeat in range(given.repeats + 1):
            for unpad in times:
                model.trunk.config.unpad_inputs = unpad
                begin = time.perf_counter()
                states[unpad] = model(ids, mask).last_hidden_state
                if given.device != "cpu":
                    torch.cuda.synchronize()
                if repeat:  # the first run warms up
                    times[unpad].append(time.perf_counter() - begin)
    padded, unpadded = (statistics.median(times[unpad]) for unpad in (False, True))
    apart = (states[True] - states[False])[mask.bool()].abs().max().item()
    print(f"{given.variant}: {mask.float().mean():.0%} of {given.batch} x {given.length} slots are real tokens")
    print(f"padded    {padded * 1e3:9.1f} ms")
    print(
        f"unpadded  {unpadded * 1e3:9.1f} ms   {padded / unpadded:.2f} times as fast; largest difference {apart:.1e}"
    )


if __name__ == "__main__":
    main()
