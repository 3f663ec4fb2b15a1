"""The page of inference techniques: what Faster-Transformer and TurboTransformers did, by what it is done here, for
which families, and the test that shows that no result changes. What families can do is read from their
declarations."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_xformers.core.cache import make_cache, stateful_part
from hf_xformers.core.components import refuse_unpadding
from hf_xformers.core.paging import why_not_paged
from hf_xformers.variants import family

from . import catalog
from .markup import Pages, code, link, page, source_link, table

PAGE = "guides/techniques.md"
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Can:
    """What a family's components declare, of its default sizes. decodes: it is a causal decoder, too; the fields after
    it are of that. state: what it keeps but for plain keys and values. no_unpadding, no_pages: why not; empty:
    it can."""

    no_unpadding: str
    decodes: bool
    state: str = ""
    rolls_back: bool = False
    no_pages: str = ""


@functools.cache
def families() -> dict[str, Can]:
    """Name of every variant -> what it can do."""
    return {name: _of(config) for name, config in catalog.variants().items()}


def _of(config_class: Any) -> Can:
    reason = ""
    for tower in config_class().tower_configs():
        try:
            refuse_unpadding(tower)
        except ValueError as error:
            found = re.search(r"attentions, which (.*) does not allow: (.*); leave", str(error))
            reason = str(error) if found is None else f"{found[1]}: {found[2]}"
    if "ForCausalLM" not in family(config_class.model_type):
        return Can(reason, False)
    config = config_class(is_decoder=True, is_encoder_decoder=False)
    pages = why_not_paged(config).replace(" does not allow", "")
    return Can(reason, True, stateful_part(config), make_cache(config).is_croppable, pages)


@dataclass(frozen=True)
class Technique:
    """A row of the page. faster, turbo: what the two runtimes had (empty: nothing). here: what does it today. counts:
    which families, counted; or whom: in words. tests: paths of tests, `file::function`. over: what they run
    over."""

    name: str
    faster: str
    turbo: str
    here: str
    tests: tuple[str, ...]
    over: str
    whom: str = ""
    counts: Callable[[Can], bool] | None = None
    among: str = "all"  # or "decoders"


TECHNIQUES = (
    Technique(
        "Fused operators between matrix products",
        "six kernels of its own in a block",
        "kernels of its own",
        "`torch.compile(model, fullgraph=True)`: inductor writes them",
        ("tests/common/test_compiling.py::test_compile",),
        "every mechanism, stack, block and position",
        "all",
    ),
    Technique(
        "One graph for several lengths",
        "none: a shape each",
        "its allocator plans for a length",
        "`torch.compile(model, dynamic=True)`, `hf-xformers export`",
        (
            "tests/inference/test_one_graph.py::test_one_graph_for_several_lengths",
            "tests/inference/test_onnx.py::test_parity",
        ),
        "BERT, a decoder of the Llama kind; eleven families in ONNX",
        "all but those whose pattern is that of one length (`why_not`: BigBird, BP-Transformer), which are"
        " exported for one length; for the factors of CSALR's solver ONNX has no operator",
    ),
    Technique(
        "Fused attention",
        "TensorRT's, in half precision",
        "fused softmax",
        "`attn_implementation`: SDPA, FlexAttention, FlashAttention; engines of this package (`ops/`)",
        ("tests/common/test_outputs.py::test_eager_equals_fast",),
        "every component",
        "all: the fast path next to the literal equation",
    ),
    Technique(
        "Batched reductions of softmax and layer norm",
        "one block for each row",
        "several rows in one block; variance in one pass",
        "SDPA and `F.layer_norm`; a variance in one pass is not taken over, as it fails where the mean is large",
        ("tests/common/test_large_weights.py::test_finite_in_half_precision",),
        "every component, with large weights",
        "all",
    ),
    Technique(
        "Queries, keys and values in one product",
        "one matrix, three times as wide",
        "the same",
        "`fuse_projections(model)`; files keep the three names",
        ("tests/inference/test_fused_projections.py::test_the_same_model",),
        "every attention that joins them",
        "all whose three projections are plain ones of one input; others are refused with the reason",
    ),
    Technique(
        "Half precision",
        "float16, later bfloat16",
        "float16",
        "`dtype=torch.bfloat16`; softmax, norms, routers and running sums stay in float32",
        (
            "tests/common/test_padding.py::test_half_precision",
            "tests/inference/test_caches.py::test_bfloat16_generation",
        ),
        "every component",
        "all",
    ),
    Technique(
        "Weights of 8 bits",
        "two modes, per channel and per tensor",
        "",
        "`hf-xformers quantize` (torchao); a scale for a whole tensor is not taken over: rows of unlike size lose all",
        ("tests/inference/test_int8.py::test_int8",),
        "seven mechanisms: near, not equal",
        "all; what components name is left alone",
    ),
    Technique(
        "Padding removal",
        "Effective Transformer: rows are rebuilt around the attention alone",
        "batches of unlike lengths",
        "`unpad_inputs=True`",
        (
            "tests/inference/test_padding_removal.py::test_equals_padded",
            "tests/inference/test_padding_removal.py::test_rows_and_tokens_that_leave_early",
        ),
        "every family that it is for; exits of rows and of tokens",
        counts=lambda can: not can.no_unpadding,
    ),
    Technique(
        "Memory used again",
        "one workspace",
        "an allocator that knows the length, in pieces of 2 MB",
        "torch's caching allocator; nothing stays alive between calls",
        ("tests/inference/test_reuse.py::test_memory_is_given_back",),
        "every type of state",
        "all",
    ),
    Technique(
        "Keys and values allocated once",
        "preallocated for the longest text",
        "",
        '`cache_implementation="static"`; a state of constant size needs none, and is used instead',
        (
            "tests/inference/test_caches.py::test_static_cache",
            "tests/inference/test_caches.py::test_one_graph_for_every_step",
        ),
        "every decoder; compiled: five",
        counts=lambda can: not can.state,
        among="decoders",
    ),
    Technique(
        "Beam search by indices into the cache",
        "no copies of keys and values",
        "",
        "`generate(num_beams=...)`: states of every kind are put in a new order",
        ("tests/common/test_generation.py::test_beam_search",),
        "every decoder",
        "all decoders",
    ),
    Technique(
        "A prefix read once for several texts",
        "",
        "",
        "`past_key_values`, `batch_repeat_interleave` of every type of state",
        ("tests/inference/test_reuse.py::test_one_prefix_for_several_texts",),
        "every type of state",
        "all decoders",
    ),
    Technique(
        "Speculative decoding",
        "",
        "",
        "`generate(assistant_model=...)`, `prompt_lookup_num_tokens`, after multi-token prediction `use_mtp`: where a"
        " state can forget its last tokens",
        (
            "tests/inference/test_reuse.py::test_speculative_decoding",
            "tests/objectives/test_module_drafts.py::test_any_modules_leave_the_text",
        ),
        "every type of state",
        counts=lambda can: can.rolls_back,
        among="decoders",
    ),
    Technique(
        "Continuous batching",
        "",
        "",
        "`generate_batch`, `transformers serve --continuous-batching`: keys and values in pages",
        ("tests/inference/test_continuous_batching.py::test_equals_generate",),
        "every type of score that pages serve",
        counts=lambda can: not can.no_pages,
        among="decoders",
    ),
    Technique(
        "Batches chosen by length",
        "",
        "dynamic programming over sorted lengths",
        "`plan_batches(lengths, cost, max_batch)` of `examples/batch_plan.py`",
        (
            "tests/examples/test_batch_plan.py::test_no_set_partition_is_better",
            "tests/examples/test_batch_plan.py::test_results_do_not_depend_on_the_plan",
        ),
        "random sets of six lengths against all 203 partitions; BERT",
        "encoders",
    ),
    Technique(
        "A step of decoding as a graph",
        "CUDA kernels of each step",
        "",
        "`hf-xformers export --step`: the state goes in and out",
        (
            "tests/inference/test_step_export.py::test_greedy_tokens_are_those_of_generate",
            "tests/inference/test_step_export.py::test_an_encoder_before_the_decoder",
        ),
        "15 types of state; BART, T5 and a linear encoder-decoder",
        "decoders, with an encoder or without, whose state grows by one rule; others are refused with the reason",
    ),
    Technique(
        "Parallelism over devices",
        "tensor and pipeline",
        "",
        '`tp_plan="auto"`; [many devices](devices.md)',
        ("tests/training/test_distributed.py",),
        "every family by data, several by tensors; processes of gloo on a CPU",
        "all; heads that exchange what they read keep whole projections (`splits`)",
    ),
)

NOT_APPLICABLE = (
    "**Kernels written by hand.** Both runtimes are finished projects for the devices of their time. Here compilers"
    " write kernels, and engines call torch's; there is no CUDA code to maintain.",
    "**GELU by tanh in place of erf**, which both take for speed, changes results by up to 5e-4. Here the activation"
    " is that of the config.",
    '**CUDA graphs.** `torch.compile(mode="reduce-overhead")` records them on a CUDA device, for a static cache or a'
    " state of constant size. On a CPU there are none.",
    "**Padding removal while generating.** A step has one token for each text, so there is no padding to leave out;"
    " texts of unlike lengths share a pass by continuous batching.",
    "**Sparsity of two in four** saves time on kernels of its own alone: `hf-xformers prune` writes such weights, and"
    " [compress](compress.md) says what they keep of quality.",
)


def pages() -> Pages:
    return {PAGE: techniques()}


def techniques() -> str:
    return page(
        "Techniques of inference",
        "What the runtimes Faster-Transformer (NVIDIA) and TurboTransformers (Tencent) did for speed, what does"
        " it today, and for which families. Apart from rounding (bfloat16, 8 bits) no result changes: the test next"
        " to each shows it, over what the last column says. How to use them: [serve](serve.md). Figures compared"
        " with transformers' models: [results](../results/index.md).",
        table(_row(technique) for technique in TECHNIQUES),
        "## What is not taken over, and why",
        "\n".join(f"- {reason}" for reason in NOT_APPLICABLE),
        "## Family by family",
        "As their components declare it, at default sizes; another component in its place may change it."
        f" {NONE}: it is no decoder.",
        table(_family(name, can) for name, can in families().items()),
        description="Inference techniques by family, each with the test that shows that it changes no result",
    )


def _row(technique: Technique) -> dict[str, str]:
    return {
        "technique": technique.name,
        "Faster-Transformer": technique.faster or NONE,
        "TurboTransformers": technique.turbo or NONE,
        "here": technique.here,
        "families": technique.whom or counted(technique),
        "test": "<br>".join(map(source_link, dict.fromkeys(path.partition("::")[0] for path in technique.tests))),
        "over": technique.over,
    }


def counted(technique: Technique) -> str:
    """How many families declare that they can."""
    if technique.counts is None:
        raise ValueError(f"technique {technique.name!r} says neither `whom` it serves nor what `counts`")
    asked = [can for can in families().values() if can.decodes or technique.among == "all"]
    able = sum(map(technique.counts, asked))
    return f"{able} of {len(asked)}{'' if technique.among == 'all' else ' decoders'}, see below"


def _family(name: str, can: Can) -> dict[str, str]:
    def says(reason: str) -> str:
        return f"no: {_coded(reason)}" if reason else "yes"

    row = {"family": link(catalog.variant_title(name), PAGE, catalog.variant_page(name))}
    row["padding removal"] = says(can.no_unpadding)
    row["keeps"] = NONE if not can.decodes else f"state of {_coded(can.state)}" if can.state else "keys and values"
    row["speculative decoding"] = NONE if not can.decodes else "yes" if can.rolls_back else "no: cannot roll back"
    row["continuous batching"] = NONE if not can.decodes else says(can.no_pages)
    return row


def _coded(text: str) -> str:
    return re.sub(r"'([^']*)'", lambda found: code(found[1]), text)
