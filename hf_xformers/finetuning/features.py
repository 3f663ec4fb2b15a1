"""Features of texts from a model that stays as it is (Peters et al. 2019, arXiv 1903.05987): hidden states of chosen
layers, mixed, pooled or by token, in files that a stopped run goes on with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.pooling import pool
from ..core.saved_files import read_object, write_json
from ..inference.batch_plan import BatchCosts, measure_batch_costs, plan_batches
from . import loading
from .options import TaskData, TaskOptions
from .tasks.classification import TextClassification

if TYPE_CHECKING:
    from datasets import Dataset

ABOUT_FILE = "features.json"
POOLINGS = ("first", "mean", "last", "none")
FORMATS = ("parquet", "safetensors")
_SUFFIX = {"parquet": ".parquet", "safetensors": ".safetensors"}


@dataclass
class FeatureOptions:
    """What is read off which layers of which model, and where it goes."""

    _argument_group_name = "features"

    model: str = field(metadata={"help": "Folder of a saved model, or a Hub id. It is not trained."})
    output: str = field(metadata={"help": "Folder of the files, with a subfolder for each split of the data."})
    layers: list[str] = field(
        default_factory=lambda: ["last"],
        metadata={
            "help": (
                "embedding, last (what heads read), last4 (the last four side by side), mix (a weighted mean of all),"
                " or numbers: 0 is the embedding, 1 the first layer. Each becomes a column."
            )
        },
    )
    pool: str = field(
        default="mean",
        metadata={"help": "One vector for a text: its first, last or mean real token; none for one for every token."},
    )
    mix_scores: list[float] = field(
        default_factory=list,
        metadata={
            "help": (
                "Scores s of embedding and layers, from below, for mix: the sum of softmax(s)_l h^l. Default: equal"
                " ones, which is the mean."
            )
        },
    )
    normalize: bool = field(
        default=False,
        metadata={"help": "Give every state mean 0 and variance 1 before mixing: for models that normalise first."},
    )
    format: str = field(default="parquet", metadata={"help": "parquet or safetensors."})
    rows_per_file: int = field(default=2048, metadata={"help": "Texts of a file; a resumed run goes on by files."})
    batch_size: int = field(default=16, metadata={"help": "Texts of a batch; those of like lengths are together."})
    plan_batches: bool = field(
        default=False,
        metadata={
            "help": (
                "Measure first how long batches of several sizes take, and put texts together such that all are done"
                " soonest, with at most --batch_size in a batch; features are the same."
            )
        },
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a text. Default: 256, at most what positions cover."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Default: the tokenizer saved with the model."})
    text_column: str | None = field(default=None, metadata={"help": "Column of the text. Default: a usual name."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of a second text."})
    probe: str | None = field(
        default=None,
        metadata={
            "help": (
                "Also fit a linear classifier of this column's labels on the features of the training rows, and"
                " measure it on the others, beside always saying the most frequent label."
            )
        },
    )
    learn_mix: bool = field(
        default=False,
        metadata={
            "help": (
                "With --layers mix and --probe: write every layer, and learn the scores of the mix with the probe,"
                " which probe.json then has for --mix_scores."
            )
        },
    )
    probe_l2: float = field(default=1e-3, metadata={"help": "Weight of the squared weights in the probe's loss."})
    overwrite: bool = field(default=False, metadata={"help": "Replace the features that --output holds."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave an accelerator alone."})
    progress: bool = field(default=True, metadata={"help": "Show a bar; --no_progress for none."})

    def check(self) -> None:
        """Raises ValueError for values out of range and for what does not go together."""
        for name, known in (("pool", POOLINGS), ("format", FORMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)!r} is unknown; take one of {', '.join(known)}")
        for name in ("rows_per_file", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"--layers {' '.join(self.layers)} must name one layer or more, each once")
        if not 0 <= self.probe_l2 < float("inf"):
            raise ValueError(f"--probe_l2 {self.probe_l2:g} must be at least 0")
        if self.probe is not None and self.pool == "none":
            raise ValueError("--probe classifies texts, which need one vector each; take --pool mean, first or last")
        if self.learn_mix and (self.layers != ["mix"] or self.probe is None):
            raise ValueError(
                "--learn_mix learns the scores of --layers mix with the classifier of --probe; give both, and no other"
                " layers"
            )
        if self.mix_scores and "mix" not in self.layers:
            raise ValueError("--mix_scores are of --layers mix; add it, or leave the scores out")


# ------------------------------------------------------------------------------------------------ layers


class ScalarMix(nn.Module):
    """gamma sum_l softmax(s)_l h^l over L states (Peters et al. 2018, arXiv 1802.05365, equation 1).

    normalize: give every state mean 0 and variance 1 over its width first.
    """

    def __init__(self, count: int, scores: Sequence[float] = (), normalize: bool = False) -> None:
        super().__init__()
        start = torch.zeros(count) if not len(scores) else torch.tensor(list(scores), dtype=torch.float32)
        if len(start) != count:
            raise ValueError(
                f"--mix_scores has {len(start)} numbers, and the model has {count} states, the embedding and"
                f" {count - 1} layers; give one for each"
            )
        self.scores, self.gamma, self.normalize = nn.Parameter(start), nn.Parameter(torch.ones(())), normalize

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        weights = self.scores.softmax(0)
        if self.normalize:
            states = [nn.functional.layer_norm(state, state.shape[-1:]) for state in states]
        return self.gamma * sum(weight * state for weight, state in zip(weights, states))


class LayerChoice:
    """Which of a model's states make each column. count: of states, the embedding among them. apart: the states that
    a mix is to be learned of are columns, in place of the mix.

    Raises ValueError for an unknown layer, and for one that the model does not have.
    """

    def __init__(
        self, layers: Sequence[str], count: int, scores: Sequence[float], normalize: bool, *, apart: bool = False
    ) -> None:
        self.count, self.layers, self.normalize = count, list(layers), normalize and apart
        self.mix = ScalarMix(count, scores, normalize) if "mix" in layers else None
        self.columns: dict[str, list[int]] = {}
        if apart:
            layers = [str(place) for place in range(count)]
        for layer in layers:
            if layer == "last4" and count < 5:
                raise ValueError(f"--layers last4 needs four layers, and the model has {count - 1}; take last")
            known = {"embedding": [0], "last": [count - 1], "last4": list(range(count - 4, count)), "mix": []}
            if layer not in known and not layer.lstrip("-").isdecimal():
                raise ValueError(f"--layers {layer!r} is unknown; take {', '.join(known)} or a number")
            places = known.get(layer) or ([] if layer == "mix" else [int(layer)])
            if any(not 0 <= place < count for place in places):
                raise ValueError(
                    f"--layers {layer} is not there: the model has the layers 1 to {count - 1}, and 0 is its embedding"
                )
            self.columns[layer if layer in known else f"layer_{int(layer)}"] = places

    def read(self, states: Sequence[Tensor]) -> dict[str, Tensor]:
        """[B, T, D] of every state -> [B, T, D] of every column, or [B, T, 4 D]."""
        found = {}
        for name, places in self.columns.items():
            if name == "mix" and self.mix is not None:
                found[name] = self.mix(states)
            else:
                found[name] = torch.cat([self._given(states[place]) for place in places], dim=-1)
        return found

    def _given(self, state: Tensor) -> Tensor:
        """A state as a mix would read it."""
        return nn.functional.layer_norm(state, state.shape[-1:]) if self.normalize else state


# ------------------------------------------------------------------------------------------------ the model


class Reader:
    """A saved model's encoder (or decoder alone) that reads texts, without gradients and without dropout."""

    def __init__(self, options: FeatureOptions) -> None:
        from transformers import AutoModel

        from ..core.saved_files import refuse_damaged_weights
        from ..data import check_tokenizer, load_tokenizer

        self.config = loading.open_config(options.model)
        self.tokenizer = load_tokenizer(options.tokenizer or options.model)
        loading.fit_tokenizer(self.tokenizer, self.config)
        check_tokenizer(self.tokenizer, self.config)
        self.tokenizer.padding_side = "right"
        self.max_length = _length(options.max_length, self.config)
        refuse_damaged_weights(options.model)
        model: Any = AutoModel.from_pretrained(options.model)
        model = model.get_encoder() if self.config.is_encoder_decoder else model
        on_cpu = options.use_cpu or not torch.cuda.is_available()
        self.model = model.eval().requires_grad_(False).to("cpu" if on_cpu else "cuda")
        self.count = len(self.states(self.batch([[""]]))[0])
        self._costs: BatchCosts | None = None
        self.choice = LayerChoice(
            options.layers, self.count, options.mix_scores, options.normalize, apart=options.learn_mix
        )

    def batch(self, texts: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """texts: of each row its text, or its two."""
        columns = [list(column) for column in zip(*texts)]
        made = self.tokenizer(*columns, truncation=True, max_length=self.max_length, padding=True, return_tensors="pt")
        return {name: value.to(self.model.device) for name, value in made.items()}

    def tokenized(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Ids of each row, without padding."""
        columns = [list(column) for column in zip(*texts)]
        return self.tokenizer(*columns, truncation=True, max_length=self.max_length)["input_ids"]

    def costs(self, longest: int, batch: int) -> BatchCosts:
        """Seconds of batches of up to `batch` texts of up to `longest` tokens, measured once and kept until there are
        longer ones."""
        if self._costs is None or self._costs.lengths[-1] < longest:
            token = self.tokenizer.pad_token_id or 0

            def run(length: int, count: int) -> None:
                ids = torch.full((count, length), token, device=self.model.device)
                self.states({"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0][-1].sum().item()

            self._costs = measure_batch_costs(run, _doubled(longest, 8), _doubled(batch, 1))
        return self._costs

    def states(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """([B, T, D] of the embedding and every layer, [B, T] real tokens). The last is what heads read.

        Raises ValueError for a model that does not have a state of every token in every layer.
        """
        with torch.no_grad():
            out = self.model(**batch, output_hidden_states=True)
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        found = list(out.hidden_states or ())
        if len(found) < 2 or any(state.shape[:2] != mask.shape for state in [*found, out.last_hidden_state]):
            raise ValueError(
                f"a model of type {self.config.model_type!r} does not have a state of every token after every layer;"
                " take a model of another type"
            )
        return [*(state.float() for state in found[:-1]), out.last_hidden_state.float()], mask.bool()


def _doubled(last: int, first: int) -> list[int]:
    """first, twice that, and so on, up to `last`."""
    found = [min(first, last)]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return found


def _length(given: int | None, config: Any) -> int:
    from ..configuration_xformer import XFormerConfig
    from ..training.building import longest_input

    ours = isinstance(config, XFormerConfig)
    limit = longest_input(config) if ours else getattr(config, "max_position_embeddings", None)
    if given is not None and limit is not None and given > limit:
        raise ValueError(
            f"--max_length {given} is more than the {limit} tokens that the model's positions cover; take at most"
            f" {limit}"
        )
    return given or min(256, limit or 256)


# ------------------------------------------------------------------------------------------------ a run


@dataclass
class Extraction:
    """splits: by name the rows, their texts, and the files of their features. resumed: files that were there."""

    options: FeatureOptions
    reader: Reader
    splits: dict[str, Dataset]
    texts: dict[str, list[list[str]]]
    files: dict[str, list[Path]]
    about: dict[str, Any]

    @property
    def missing(self) -> list[tuple[str, int]]:
        return [
            (split, index)
            for split, files in self.files.items()
            for index, file in enumerate(files)
            if not file.is_file()
        ]


def prepare(options: FeatureOptions, source: TaskData) -> Extraction:
    """Reads data and model, and checks that the folder holds nothing else.

    Raises ValueError that names the value and the remedy.
    """
    from .sources import load_rows

    options.check()
    if not source.data:
        raise ValueError("there are no texts to read; give them with --data")
    source.validation_fraction = source.validation_fraction if options.probe is not None else 0.0
    splits = load_rows(source)
    task = TextClassification(
        TaskOptions(
            task="text-classification",
            text_column=options.text_column,
            text_pair_column=options.text_pair_column,
            label_column=options.probe,
        )
    )
    texts = {}
    for name, rows in splits.items():
        task.find_columns(rows, answers=options.probe is not None)
        columns = [[("" if text is None else str(text)) for text in rows[column]] for column in task.text_columns]
        texts[name] = [list(row) for row in zip(*columns)]
    folder = Path(options.output).expanduser()
    about = _request(options, texts)
    before = read_object(folder / ABOUT_FILE) if (folder / ABOUT_FILE).is_file() else None
    if before is not None and before.get("request") != about["request"] and not options.overwrite:
        raise ValueError(
            f"--output {str(folder)!r} holds features of another request (other data, model, layers or sizes); take"
            " --overwrite to replace them, or another folder"
        )
    reader = Reader(options)
    about |= {"states": reader.count, "width": int(reader.model.config.hidden_size), "max_length": reader.max_length}
    suffix = _SUFFIX[options.format]
    files = {
        name: [
            folder / name / f"features-{index:05d}{suffix}" for index in range(-(-len(rows) // options.rows_per_file))
        ]
        for name, rows in texts.items()
    }
    if options.overwrite and (before is None or before.get("request") != about["request"]):
        _remove(folder)
    return Extraction(options, reader, splits, texts, files, about)


def _remove(folder: Path) -> None:
    for path in [*folder.glob("*/features-*"), folder / ABOUT_FILE]:
        path.unlink(missing_ok=True)


def _request(options: FeatureOptions, texts: Mapping[str, list[list[str]]]) -> dict[str, Any]:
    ignored = ("output", "batch_size", "plan_batches", "probe", "probe_l2", "overwrite", "use_cpu", "progress")
    request = {name: value for name, value in asdict(options).items() if name not in ignored}
    if options.learn_mix:
        del request["mix_scores"]  # where learning begins, and nothing of the files
    else:
        del request["learn_mix"]  # as files were written before there was this
    digest = hashlib.sha256()
    for name, rows in texts.items():
        digest.update(f"{name} {len(rows)}\n".encode())
        for row in rows:
            digest.update("\0".join(row).encode("utf-8", "replace") + b"\n")
    request["texts"] = digest.hexdigest()
    return {"request": request, "rows": {name: len(rows) for name, rows in texts.items()}}


def extract(made: Extraction, advance: Callable[[int], None] = lambda rows: None) -> None:
    """Writes the files that are missing, each whole or not at all. advance: called with numbers of rows done."""
    folder = Path(made.options.output).expanduser()
    write_json(folder / ABOUT_FILE, made.about)
    size = made.options.rows_per_file
    for split, index in made.missing:
        rows = made.texts[split][index * size : (index + 1) * size]
        columns = read_rows(made.reader, rows, made.options, advance)
        write_file(made.files[split][index], columns, first=index * size)


def read_rows(
    reader: Reader, rows: Sequence[list[str]], options: FeatureOptions, advance: Callable[[int], None]
) -> dict[str, list[Tensor]]:
    """By column the features of every row, in order: [D], or [tokens, D] without pooling."""
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in reader.choice.columns}
    for chosen in _batches(reader, rows, options):
        states, mask = reader.states(reader.batch([rows[index] for index in chosen]))
        with torch.no_grad():
            columns = reader.choice.read([state.cpu() for state in states])
        mask = mask.cpu()
        for name, values in columns.items():
            pooled = values if options.pool == "none" else pool(values, mask, options.pool)
            for place, index in enumerate(chosen):
                found[name][index] = pooled[place][mask[place]] if options.pool == "none" else pooled[place]
        advance(len(chosen))
    return found


def _batches(reader: Reader, rows: Sequence[list[str]], options: FeatureOptions) -> list[list[int]]:
    """Which rows are read together: those of like lengths, or those that a plan joins; longest first, so that what
    does not fit into memory fails at once."""
    if options.plan_batches:
        lengths = [max(len(ids), 1) for ids in reader.tokenized(rows)]
        return plan_batches(lengths, reader.costs(max(lengths), options.batch_size), options.batch_size)[::-1]
    order = sorted(range(len(rows)), key=lambda index: -sum(map(len, rows[index])))
    return [order[start : start + options.batch_size] for start in range(0, len(order), options.batch_size)]


# ------------------------------------------------------------------------------------------------ files


def write_file(path: Path, columns: Mapping[str, Sequence[Tensor]], first: int) -> None:
    """`row` (its number in the split) and a column for each layer. In safetensors features by token stand after each
    other, and `tokens` says how many each row has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    count = len(next(iter(columns.values())))
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays = {"row": pa.array(range(first, first + count), pa.int64())}
        for name, values in columns.items():
            kind = pa.list_(pa.float32()) if values[0].ndim == 1 else pa.list_(pa.list_(pa.float32()))
            arrays[name] = pa.array([value.tolist() for value in values], kind)
        pq.write_table(pa.table(arrays), beside)
    else:
        from safetensors.torch import save_file

        tensors = {"row": torch.arange(first, first + count)}
        for name, values in columns.items():
            by_token = values[0].ndim == 2
            tensors[name] = torch.cat(list(values)) if by_token else torch.stack(list(values))
            if by_token:
                tensors["tokens"] = torch.tensor([len(value) for value in values])
        save_file({name: value.contiguous() for name, value in tensors.items()}, beside, metadata={"format": "pt"})
    os.replace(beside, path)


def read_features(folder: str | Path, split: str = "train") -> Iterator[dict[str, Any]]:
    """The rows of a split: `row`, and by column a tensor, [D] or [tokens, D]."""
    for path in sorted((Path(folder) / split).glob("features-*")):
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path).to_pylist()
            for entry in table:
                yield {name: value if name == "row" else torch.tensor(value) for name, value in entry.items()}
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
            rows, counts = tensors.pop("row").tolist(), tensors.pop("tokens", None)
            parts = {
                name: list(value if counts is None else value.split(counts.tolist()))
                for name, value in tensors.items()
            }
            for place, row in enumerate(rows):
                yield {"row": row, **{name: values[place] for name, values in parts.items()}}


__all__ = [
    "Extraction",
    "FeatureOptions",
    "LayerChoice",
    "Reader",
    "ScalarMix",
    "extract",
    "prepare",
    "read_features",
    "read_rows",
]
