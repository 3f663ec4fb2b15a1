# SPDX-License-Identifier: Apache-2.0
"""The command `hf-xformers` (also `python -m hf_xformers`): one file of this folder per sub-command."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

# sub-command -> (module of this folder, what it does); a module has `run(argv) -> exit code`. No module may have the
# name of a built-in function that this file uses: importing a submodule binds its name here.
COMMANDS = {
    "list": ("listing", "show variants and components: what they change, which architectures they fit"),
    "pretrain": ("pretrain", "train a variant, or a free mix of components, on text or images"),
    "finetune": ("finetune", "train a saved model, or a variant, on a task: classify, tag, answer, translate, ..."),
    "features": ("features", "write hidden states of chosen layers to files; train a linear probe on them"),
    "predict": ("predict", "run a fine-tuned model on new rows: labels, tags, answers, texts"),
    "evaluate": ("evaluate", "measure loss and accuracy of a language model, or a fine-tuned model's metrics"),
    "convert": (
        "convert",
        "turn a checkpoint of transformers into a variant, or back; swap components of a trained one",
    ),
    "uptrain": ("uptrain", "continue the pretraining of a model, with a teacher or without"),
    "linearize": ("linearize", "give a trained model attention whose state for generation does not grow, in stages"),
    "distill": ("distill", "train a small model on a large one's outputs: fewer layers, another width or mechanism"),
    "prune": ("prune", "remove heads, layers or weights of a trained model, and measure what that costs"),
    "quantize": ("quantize", "store weights in 8 or 4 bits, but for those that must not be quantized"),
    "search": ("search", "find the operations of a DARTSformer's layers by gradient descent"),
    "benchmark": ("benchmark", "compare variants: time, memory, and what they learn, compared with dense attention"),
    "card": ("card", "write the model card of a variant or of a checkpoint, with measured figures"),
    "export": ("export", "write a model as an ONNX graph, and compare both under onnxruntime"),
    "bundle": ("bundle", "put the code that it needs into a checkpoint, for users without this package"),
    "new": ("new", "begin a component, objective or task of your own: a file, its test, a stub of its card"),
    "push": ("push", "upload a checkpoint or an adapter to the Hub, with a card"),
}
DEBUG_VARIABLE = "HF_XFORMERS_DEBUG"

_USAGE = """usage: hf-xformers [--version] [--debug] COMMAND ...

Variants of the Transformer as Hugging Face models, with components that can be
mixed.

{commands}

`hf-xformers COMMAND --help` explains a command.
--import MODULE (of every command) imports a module of yours, whose components
can then be named.
--debug (or {debug}=1) shows the traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code: 0, 1 (no cell of a benchmark was measured), 2 (input that cannot
    work), 130 (interrupted), 141 (nobody reads the output any more)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not sys.stderr.isatty():  # bars that move are of no use in a file
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    debug = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    while arguments and arguments[0] == "--debug":
        debug, arguments = True, arguments[1:]
    try:
        arguments = _import_modules(arguments)
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            return _help()
        if arguments[0] == "--version":
            from .. import __version__

            print(f"hf-xformers {__version__}")
            return 0
        return _command(arguments[0])(arguments[1:])
    except BrokenPipeError:  # whoever reads the output has seen enough of it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from .console import is_refusal, print_error
        from .file_errors import explain

        text = explain(error)
        if debug or (text is None and not is_refusal(error)):
            raise
        print_error(error, text)
        return 2
    except KeyboardInterrupt as stopped:
        if debug:
            raise
        print("\n" + ": ".join(filter(None, ["hf-xformers: interrupted", str(stopped)])), file=sys.stderr)
        return 130


def _help() -> int:
    lines = "\n".join(
        textwrap.fill(
            text,
            max(40, shutil.get_terminal_size().columns),
            initial_indent=f"  {name:<10} ",
            subsequent_indent=" " * 13,
        )
        for name, (_, text) in COMMANDS.items()
    )
    print(_USAGE.format(commands=lines, debug=DEBUG_VARIABLE))
    return 0


def _import_modules(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--import MODULE`, whose modules are imported here and in processes that begin later."""
    rest: list[str] = []
    modules: list[str] = []
    waiting = iter(arguments)
    for token in waiting:
        if token == "--import":
            modules.append(next(waiting, ""))
        elif token.startswith("--import="):
            modules.append(token.removeprefix("--import="))
        else:
            rest.append(token)
    if "" in modules:
        raise ValueError("argument --import: expected the name of a module")
    from ..core.discovery import IMPORTED, PLUGINS, import_plugins

    if modules:
        sys.path.insert(0, os.getcwd())
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        os.environ[IMPORTED] = ",".join(filter(None, [os.environ.get(IMPORTED), *modules]))
    if modules or importlib.metadata.entry_points(group=PLUGINS):  # families among them are variants, too
        import_plugins()
    return rest


def _command(name: str):
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"there is no command {name!r}.{hint} Choose one of {', '.join(COMMANDS)}")
    return importlib.import_module(f"{__name__}.{COMMANDS[name][0]}").run
