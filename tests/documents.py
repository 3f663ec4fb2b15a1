"""What the tests of the README and of the documentation share: code blocks, short commands, the files they name."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", flags=re.DOTALL | re.MULTILINE)


def blocks(markdown: str) -> list[tuple[str, str]]:
    """(kind, text) of the code blocks of a page, in their order."""
    return [(kind, textwrap.dedent(text)) for _, kind, text in _BLOCK.findall(markdown)]


def lines(block: str) -> list[str]:
    """The commands of a console block, continued lines joined, without comments."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in (line.split(" #")[0].strip() for line in joined) if line and not line.startswith("#")]


def short(arguments: list[str]) -> list[str]:
    """A command as written, but for the length of the run and the size of the model."""
    arguments = list(arguments)
    if arguments[0] in ("pretrain", "uptrain"):
        if "--max_steps" in arguments:
            arguments[arguments.index("--max_steps") + 1] = "2"
        else:  # in a file of options
            arguments += ["--max_steps", "2"]
        arguments += ["--use_cpu", "--eval_strategy", "no"]
    if arguments[0] == "linearize":
        for name in ("--transfer_steps", "--distillation_steps"):
            if name in arguments:
                arguments[arguments.index(name) + 1] = "2"
        arguments += ["--use_cpu", "--eval_strategy", "no"]
    if arguments[0] == "finetune":
        arguments += ["--num_train_epochs", "1", "--use_cpu"]
    if arguments[0] == "pretrain":
        arguments += ["--hidden_size", "32", "--num_hidden_layers", "1"]
    return arguments


@contextlib.contextmanager
def small_corpus(folder: Path) -> Iterator[None]:
    """The text of `--data stdlib` is a twelfth of itself, and prepared in `folder`."""
    import datasets

    corpus = importlib.import_module("hf_xformers.data.stdlib_corpus")  # the package has a function of this name
    documents = corpus.stdlib_documents()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        patch.setattr(corpus, "stdlib_documents", lambda: documents[::12])
        yield


def check_launch(words: list[str]) -> None:
    """`accelerate launch WORDS`: the launcher reads its options and file, and the command knows what comes behind;
    cli/test_launch.py starts two processes."""
    from accelerate.commands.launch import launch_command_parser

    from hf_xformers.cli.pretrain import make_parser

    launcher = launch_command_parser().parse_args(words)
    assert (ROOT / launcher.config_file).is_file() and launcher.module
    assert launcher.training_script == "hf_xformers.cli" and launcher.training_script_args[0] == "pretrain"
    options = launcher.training_script_args[1:]
    known = make_parser({"variant": options[options.index("--variant") + 1]})._option_string_actions
    assert all(word in known for word in options if word.startswith("--"))


def launched(line: str) -> list[str] | None:
    """The words behind `accelerate launch`; None where a line does not start it."""
    words = shlex.split(line)
    return words[words.index("accelerate") + 2 :] if "accelerate launch" in line else None


def write_rows(folder: Path) -> None:
    """A few rows in the files that the examples name."""
    texts = [f"{word} day number {index}" for index, word in enumerate(["good", "bad"] * 8)]
    rows = [f"{text},{index % 2}" for index, text in enumerate(texts)]
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    for split in ("train", "dev"):
        words = "".join(f"{word}\t{'B-N' if word.isdigit() else 'O'}\n" for word in texts[0].split())
        (folder / f"{split}.conll").write_text(f"{words}\n{words}")
        for language in ("en", "de"):
            (folder / f"{split}.{language}").write_text("\n".join(texts[:4]) + "\n")


def write_llama(folder: Path) -> None:
    """A tiny Llama where the examples have one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")


def write_roberta(folder: Path) -> None:
    """A tiny RoBERTa with its tokenizer where the examples have one."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    from hf_xformers.data import train_tokenizer

    texts = ["a short text stays as it was, a long text is read in one piece"] * 4
    tokenizer = train_tokenizer(texts, vocab_size=300, num_sentinels=0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    special = dict(pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None)
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=514, **sizes, **special)
    RobertaForMaskedLM(config).save_pretrained(folder / "roberta")
    tokenizer.save_pretrained(folder / "roberta")


def write_minilm(folder: Path) -> None:
    """A tiny sentence encoder where the examples have MiniLM, and its trained long form."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import BertConfig, BertModel

    from hf_xformers.data import train_tokenizer

    texts = ["the lobster lives in the sea", "it eats what it finds on the ground"] * 4
    tokenizer = train_tokenizer(texts, kind="wordpiece", vocab_size=90, num_sentinels=0, template="cls_sep")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes)
    for part in (BertModel(config), tokenizer):
        part.save_pretrained(folder / "models" / "bert")
    transformer = modules.Transformer(str(folder / "models" / "bert"))
    parts = [transformer, modules.Pooling(32, "mean"), modules.Normalize()]
    for name in ("minilm", "minilm-long"):
        SentenceTransformer(modules=parts, device="cpu").save(str(folder / "models" / name))
