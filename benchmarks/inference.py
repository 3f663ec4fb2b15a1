"""Encoders on texts of real lengths and decoders after long contexts, compared with transformers' own models of equal
size.

    OMP_NUM_THREADS=1 python benchmarks/inference.py --data DIR
    OMP_NUM_THREADS=1 python benchmarks/inference.py --data DIR --texts 64 --contexts 512 --layers 2 --width 128

DIR holds the sentences of SST-2 (`sst2/dev.tsv`) and the paragraphs of WikiText-2 (`wikitext2/test.txt`). Weights are
random. Every model has the settings that serve it best: SDPA and batches of like lengths for transformers' encoders;
padding removal or planned batches for this package's encoders, fused projections for its decoders. All run in turn,
and figures are processor time on a CPU.

Each set of texts and each context is written as soon as it is measured. What `results/inference.json` has already, of
the same sizes, is not measured again; with `--again` it is, and each block is replaced when the new one is there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from decoding import bytes_held, copying, generation
from measure import interleaved_seconds, ratios, write_results
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache

sys.path.append(str(Path(__file__).resolve().parent.parent))

import hf_xformers  # noqa: F401  (registers the variants)
from examples.batch_plan import measure_batch_costs, plan_batches
from hf_xformers.benchmark.measure import Bystanders
from hf_xformers.core.cache import stateful_part
from hf_xformers.data import train_tokenizer
from hf_xformers.inference import fuse_projections
from hf_xformers.modeling_base import XFormerPreTrainedModel

VOCABULARY, LONGEST = 8000, 512
Texts = list[list[int]]
Plan = Sequence[Sequence[int]]


def sentences(data: Path, count: int) -> list[str]:
    lines = (data / "sst2" / "dev.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[0] for line in lines if line][:count]


def paragraphs(data: Path, count: int) -> list[str]:
    lines = (data / "wikitext2" / "test.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("=")][:count]


# ------------------------------------------------------------------------------------------------ encoders


def size_of(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": given.width,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.width // 64,
        "intermediate_size": 4 * given.width,
    }


def of_transformers(name: str, size: dict[str, Any], **fields: Any) -> nn.Module:
    """The base model `<name>Model` of transformers, with SDPA where it has it."""
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**size, **special, **fields)
    return AutoModel.from_config(config).eval()


def of_ours(variant: str, size: dict[str, Any], **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(f"xf_{variant}", **size, pad_token_id=0, **fields)
    return AutoModel.from_config(config).eval()


def encoders(size: dict[str, Any]) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (model, how its batches are made)."""
    places: dict[str, Any] = {"max_position_embeddings": LONGEST}
    unpadded = {**places, "unpad_inputs": True}
    window = {"attention_window": [128] * size["num_hidden_layers"], "max_position_embeddings": LONGEST + 2}
    return {
        "transformers Bert": (of_transformers("Bert", size, **places), "sorted"),
        "transformers ModernBert": (of_transformers("ModernBert", size, **places), "sorted"),
        "transformers Longformer": (of_transformers("Longformer", size, **window), "sorted"),
        "xf_bert": (of_ours("bert", size, **places), "sorted"),
        "xf_bert, planned": (of_ours("bert", size, **places), "planned"),
        "xf_bert, unpadded": (of_ours("bert", size, **unpadded), "sorted"),
        "xf_bert, unpadded, any order": (of_ours("bert", size, **unpadded), "as they come"),
        "xf_longformer": (
            of_ours("longformer", size, **places, attention={"type": "longformer", "window": 64}),
            "sorted",
        ),
        "xf_performer": (of_ours("performer", size, **places), "sorted"),
    }


def padded(texts: Texts, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    longest = max(len(texts[place]) for place in places)
    ids, mask = (torch.zeros(len(places), longest, dtype=torch.long) for _ in range(2))
    for row, place in enumerate(places):
        ids[row, : len(texts[place])], mask[row, : len(texts[place])] = torch.tensor(texts[place]), 1
    return ids, mask


def call(model: nn.Module, texts: Texts, plan: Plan) -> Callable[[], None]:
    batches = [padded(texts, places) for places in plan]

    @torch.inference_mode()
    def run() -> None:
        for ids, mask in batches:
            model(input_ids=ids, attention_mask=mask)

    return run


def make_plan(kind: str, model: nn.Module, texts: Texts, batch: int) -> Plan:
    lengths = [len(text) for text in texts]
    order = list(range(len(texts)))
    if kind == "planned":

        @torch.inference_mode()
        def run(length: int, count: int) -> None:
            model(input_ids=torch.ones(count, length, dtype=torch.long))

        grid = [size for size in (8, 32, 128, LONGEST) if size <= 2 * max(lengths)]
        costs = measure_batch_costs(run, grid, [1, max(batch // 4, 1), batch], repeats=1)
        return plan_batches(lengths, costs, batch)
    if kind == "sorted":
        order.sort(key=lambda place: lengths[place])
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def measure_encoders(given: argparse.Namespace, kept: set[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of one set of texts after the other."""
    data = Path(given.data)
    sets = {"SST-2": sentences(data, given.texts), "WikiText-2": paragraphs(data, max(given.texts // 4, 8))}
    words = train_tokenizer([text for texts in sets.values() for text in texts], vocab_size=VOCABULARY)
    for name, texts in sets.items():
        if name in kept:
            continue
        ids = [row or [1] for row in words(texts, truncation=True, max_length=LONGEST)["input_ids"]]
        real, models = sum(map(len, ids)), encoders(size_of(given))
        calls = {
            label: call(model, ids, make_plan(kind, model, ids, given.batch))
            for label, (model, kind) in models.items()
        }
        seconds = interleaved_seconds(calls, given.rounds)
        slower, rows = ratios(seconds, "transformers Bert"), []
        for label, (model, kind) in models.items():
            row = {"what": name, "model": label, "batches": kind, "parameters M": parameters(model) / 1e6}
            row["tokens/s"] = real / statistics.median(seconds[label])
            row["against transformers"] = 1 / slower[label]
            rows.append({**row, "others busy": seconds.others_busy})
        yield rows


# ------------------------------------------------------------------------------------------------ decoders


def decoders(size: dict[str, Any], longest: int) -> dict[str, nn.Module]:
    """Of about equal size. Positions reach as far as the longest context asks for."""
    count, width, layers = (size[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    gated = {**size, "intermediate_size": 8 * width // 3}
    places = {"max_position_embeddings": longest}
    gpt2 = transformers.GPT2Config(
        **{"vocab_size": VOCABULARY, "n_positions": longest, "n_embd": width, "n_layer": layers, "n_head": count},
        bos_token_id=None,
        eos_token_id=None,
    )
    llama = transformers.LlamaConfig(**gated, **places, tie_word_embeddings=True)
    modern = {
        **{"position": "rotary", "normalization": "rms_norm", "residual": "pre_ln", "is_decoder": True},
        **{"feedforward": {"type": "swiglu", "bias": False}, "attention": {"type": "dense", "bias": False}},
    }
    free = {"position": "sinusoidal_absolute", "is_decoder": True}
    window = {"type": "sliding_window", "window_size": 256, "sinks": 0, "bias": False}
    configs = {
        "transformers GPT2": gpt2,
        "transformers Llama": llama,
        "xf_gpt2": AutoConfig.for_model("xf_gpt2", **size, **places),
        "dense, as Llama": AutoConfig.for_model("xformer", **gated, **modern),
        "sliding window, as Mistral": AutoConfig.for_model("xformer", **gated, **{**modern, "attention": window}),
        "xf_performer": AutoConfig.for_model("xf_performer", **size, **free),
        "xf_delta_net": AutoConfig.for_model("xf_delta_net", **size, is_decoder=True),
    }
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        found[name] = AutoModelForCausalLM.from_config(config).eval()
        if isinstance(found[name], XFormerPreTrainedModel):
            fuse_projections(found[name])
    return found


@torch.no_grad()
def read(model: Any, context: int, piece: int) -> Cache:
    """The cache after `context` tokens."""
    ids, cache = torch.randint(5, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0)), None
    for start in range(0, context, piece):
        output = model.base_model(input_ids=ids[:, start : start + piece], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
    return cache


def measure_decoders(given: argparse.Namespace, kept: set[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of one context after the other."""
    contexts = [int(context) for context in given.contexts.split(",")]
    models = decoders(size_of(given), max(contexts) + given.tokens)
    for context in contexts:
        if f"after {context}" in kept:
            continue
        caches, calls, reading = {}, {}, {}
        for name, model in models.items():
            begin = time.process_time()
            caches[name] = read(model, context, given.piece)
            reading[name] = time.process_time() - begin
            calls[name] = generation(model, caches[name], given.tokens)
        seconds = interleaved_seconds(calls, given.rounds)
        copies = {name: copying(caches[name]) for name in models}
        taken = {name: [max(spent - copies[name], 1e-9) for spent in seconds[name]] for name in models}
        slower, rows = ratios(taken, "transformers Llama"), []
        for name, model in models.items():
            row = {"what": f"after {context}", "model": name, "parameters M": parameters(model) / 1e6}
            row["tokens/s"] = given.tokens / statistics.median(taken[name])
            row["against transformers"] = 1 / slower[name]
            row["cache MiB"], row["reading s"] = bytes_held(caches[name]) / 2**20, reading[name]
            rows.append({**row, "others busy": seconds.others_busy})
        yield rows


def generated(model: Any, ids: Tensor, tokens: int, forward: Callable[..., Any]) -> Callable[[], None]:
    """Greedy text through `generate`, whose steps go through `forward`, with keys and values of fixed size where the
    model keeps these."""
    ours = isinstance(model, XFormerPreTrainedModel)
    fixed = {} if ours and stateful_part(model.config) else {"cache_implementation": "static"}
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None  # nobody looks for the end of a text

    def run() -> None:
        model.forward = forward
        model.generate(ids, **settings, **fixed, disable_compile=True)  # or `generate` compiles where it sees fit

    return run


def shortest(given: argparse.Namespace) -> int:
    return min(int(context) for context in given.contexts.split(","))


def _decode_alone(name: str, given: argparse.Namespace, asked: Any) -> None:
    """One model with compiled steps in a process of its own, where no other model's code has to be told apart from it
    at every step. Sends its number of parameters and then, as often as it is asked, the processor seconds of a context
    with one token (`reading`) and of the further ones (`writing`)."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or steps would continue without compiled code
    context, texts = shortest(given), {"reading": 1, "all": given.tokens + 1}
    model = decoders(size_of(given), context + 2 * given.tokens)[name]
    ids = torch.randint(5, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(0))
    forward = torch.compile(model.forward)
    calls = {what: generated(model, ids, tokens, forward) for what, tokens in texts.items()}
    for what in ("reading", "all", "all"):  # a length that changes is traced twice
        calls[what]()
    asked.send(parameters(model))
    while asked.recv():
        spent = {}
        for what, call in calls.items():
            start = time.process_time()
            call()
            spent[what] = time.process_time() - start
        asked.send({"reading": spent["reading"], "writing": max(spent["all"] - spent["reading"], 1e-9)})


def measure_compiled(given: argparse.Namespace, kept: set[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of the shortest context, with steps that torch.compile has turned into code."""
    what = f"after {shortest(given)}, compiled"
    if what in kept:
        return
    spawn, ends, sizes = multiprocessing.get_context("spawn"), {}, {}
    for name in decoders(size_of(given), shortest(given)):
        ends[name], other = spawn.Pipe()
        spawn.Process(target=_decode_alone, args=(name, given, other), daemon=True).start()
        other.close()
        sizes[name] = ends[name].recv()  # compiled, one after the other
    rounds: list[dict[str, dict[str, float]]] = []
    begun, bystanders = time.perf_counter(), Bystanders()
    for _ in range(3 * given.rounds):
        found = {}
        for name, end in ends.items():
            end.send(True)
            found[name] = end.recv()
        rounds.append(found)
    own = sum(sum(spent.values()) + spent["reading"] for found in rounds for spent in found.values())
    others = max(bystanders.busy() - own / (time.perf_counter() - begun), 0.0)
    for end in ends.values():
        end.send(False)
    taken = {name: [found[name]["writing"] for found in rounds] for name in ends}
    slower, rows = ratios(taken, "transformers Llama"), []
    for name in ends:
        row = {"what": what, "model": name, "parameters M": sizes[name] / 1e6}
        row["tokens/s"] = given.tokens / statistics.median(taken[name])
        row["against transformers"] = 1 / slower[name]
        row["reading s"] = statistics.median(found[name]["reading"] for found in rounds)
        rows.append({**row, "others busy": others})
    yield rows


def kept_rows(given: argparse.Namespace, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """What was measured before, of the same sizes."""
    path = Path(__file__).parent / "results" / f"{given.name}.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if all(row.get(name) == size for name, size in sizes.items())]


def with_block(rows: list[dict[str, Any]], block: list[dict[str, Any]], order: list[str]) -> list[dict[str, Any]]:
    """The rows, those of the block in place of what was measured before of the same texts or context."""
    others = [row for row in rows if row["what"] != block[0]["what"]]
    return sorted(others + block, key=lambda row: order.index(row["what"]) if row["what"] in order else len(order))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with sst2/dev.tsv and wikitext2/test.txt")
    parser.add_argument("--texts", type=int, default=256, help="sentences; and a quarter as many paragraphs")
    parser.add_argument("--batch", type=int, default=16, help="texts of a batch at most")
    parser.add_argument("--contexts", default="128,512,2048,8192,16384")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that are generated after a context")
    parser.add_argument("--piece", type=int, default=2048, help="tokens of a context that are read at once")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--part", choices=("all", "encoders", "decoders", "compiled"), default="all")
    parser.add_argument("--name", default="inference", help="results/NAME.json and results/NAME.md")
    given = parser.parse_args()
    if given.width % 64:
        parser.error(f"--width {given.width} is no multiple of 64, the width of a head")
    columns = ["what", "model", "batches", "parameters M", "tokens/s", "against transformers"]
    columns += ["cache MiB", "reading s", "others busy"]
    note = (
        f"{given.layers} layers, hidden {given.width}, random weights. Encoders: real tokens per second on"
        f" {given.texts} sentences of SST-2 and {max(given.texts // 4, 8)} paragraphs of WikiText-2, at most"
        f" {given.batch} in a batch; `against transformers`: compared with transformers' Bert with SDPA and sorted"
        f" lengths, above 1 is faster. Decoders: {given.tokens} tokens after a context that was read in pieces of"
        f" {given.piece}, batch 1, compared with transformers' Llama; `cache MiB`: what the cache holds after the"
        " context; `reading s`: seconds for the context; this package's have fused projections, as GPT-2 has."
        " `compiled`: through `generate`, steps made into code by torch.compile, with a static cache where a model"
        " keeps keys and values, each model in a process of its own, as torch looks through the code of all that a"
        " process has compiled. Models of a block ran in turn, round by round, and ratios are medians over rounds."
        " `others busy`: how many of the machine's processors other programs kept busy meanwhile; figures are"
        " processor time, so that ratios stand where times and `reading s` may not."
    )
    sizes = {"layers": given.layers, "hidden": given.width, "texts": given.texts, "tokens": given.tokens}
    rows = kept_rows(given, sizes)
    kept = set() if given.again else {row["what"] for row in rows}
    contexts = [f"after {context}" for context in given.contexts.split(",")]
    order = ["SST-2", "WikiText-2", *contexts, f"after {shortest(given)}, compiled"]
    parts = [measure_encoders(given, kept)] if given.part in ("all", "encoders") else []
    parts += [measure_decoders(given, kept)] if given.part in ("all", "decoders") else []
    parts += [measure_compiled(given, kept)] if given.part in ("all", "compiled") else []
    for part in parts:
        for found in part:
            rows = with_block(rows, [{**row, **sizes} for row in found], order)
            path = write_results(given.name, rows, columns, "Inference compared with transformers", note)
            print(*found, path, sep="\n", flush=True)


if __name__ == "__main__":
    main()
