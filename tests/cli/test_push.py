"""`hf-xformers push` through the real Hub client, against a small Hub on loopback."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from hf_xformers.adapters import add_adapter, add_fusion, load_adapter, save_adapter
from hf_xformers.cli import main
from hf_xformers.hub import bundle
from hf_xformers.hub.adapter_card import public_base
from hf_xformers.hub.push import _has_own_card, _plain_errors, prepare_upload
from hf_xformers.variants import config_class, family
from tests.conversion.architectures import architectures
from tests.forks import Forks
from tests.helpers import make_strong, tiny_fields
from tests.hub.hub_server import Hub, Repo
from tests.hub.isolated import ROOT, WITHOUT_PACKAGE, environment

SUMMARY = {
    "status": "finished",
    "variant": "xf_bert",
    "objective": {"type": "mlm"},
    "data": {"data": ["stdlib", "somebody/corpus", "/secret/place/notes.txt"]},
    "block_size": 16,
    "train_rows": 87,
    "seed": 42,
    "init_from": "somebody/start",
    "steps": 26,
    "train_loss": 5.5,
    "eval_loss": 5.25,
    "eval_perplexity": 190.5,
    "eval_runtime": 0.5,
    "eval_tokens": 20,
}

LABELS = ["bad", 'so "so"', "gut"]
ADAPTERS = ("lora", "houlsby", "fusion", "k_adapter")

COMMANDS = """
import contextlib, io, json, os, sys

os.environ["COLUMNS"] = "200"
from hf_xformers.cli import main

results = []
for token, arguments in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    results.append([code, out.getvalue() + err.getvalue()])
print(json.dumps(results))
"""

LOAD = """
import sys, torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import_package = sys.argv[1] == "installed"
if import_package:
    import hf_xformers
def aligned(model):  # on some processors the last bit of a product depends on where a file has its weights
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model

known = torch.load(sys.argv[2])
name = "user/tiny" if import_package else "user/whole"
model = AutoModelForMaskedLM.from_pretrained(name, trust_remote_code=not import_package).eval()
with torch.no_grad():
    assert torch.equal(aligned(model)(known["ids"]).logits, known["logits"])
if import_package:
    model.push_to_hub("user/plain")
    again = AutoModelForMaskedLM.from_pretrained("user/plain").eval()
    with torch.no_grad():
        assert torch.equal(aligned(again)(known["ids"]).logits, known["logits"])
else:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    assert tokenizer(["a b"]).input_ids == [[2, 1]]
    model.save_pretrained("again")
    again = AutoModelForMaskedLM.from_pretrained("again", trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(aligned(again)(known["ids"]).logits, known["logits"])
print("loaded", type(model).__module__)
"""


def make_model(seed=0):
    cls = config_class("bert")
    torch.manual_seed(seed)
    return make_strong(family("bert")["ForMaskedLM"](cls(**tiny_fields(cls, "encoder"))), seed=seed).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A finished run with what does not belong on the Hub, a later version of it, and two adapters."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("push")
    model = make_model()
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(ids).logits}, root / "known.pt")
    model.save_pretrained(root / "run")
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(root / "run")
    (root / "run" / "training_summary.json").write_text(json.dumps(SUMMARY))
    for name in "optimizer.pt scheduler.pt rng_state.pth training_args.bin predictions_test.jsonl x.py".split():
        (root / "run" / name).write_text("stays here")
    (root / "run" / "checkpoint-5").mkdir()
    (root / "run" / "checkpoint-5" / "config.json").write_text("{}")
    later = make_model(seed=1)
    later.save_pretrained(root / "later")
    base = make_model()
    add_adapter(base, "reviews", "houlsby")
    save_adapter(base, root / "bottleneck", "reviews")
    lora = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj"], r=2))
    lora.save_pretrained(root / "lora")
    adapters_on_the_run(root, ids)
    return root


def adapters_on_the_run(root, ids):
    """A LoRA adapter and a bottleneck for three classes, on the model that lies in `run`; what they give for `ids`."""
    from transformers import AutoModelForSequenceClassification

    from hf_xformers.finetuning.peft_methods import add_adapter as add_peft

    known = {"ids": ids}
    for kind in ADAPTERS:
        torch.manual_seed(2)
        names = dict(enumerate(LABELS))
        model = AutoModelForSequenceClassification.from_pretrained(root / "run", id2label=names).eval()
        if kind == "fusion":
            for name in ("one", "two"):
                add_adapter(model, name, "pfeiffer")
            adapted = add_fusion(model, "default", ["one", "two"])
        else:
            adapted = add_peft(
                model, kind, "SequenceClassification", ["classifier.weight", "model.pooler.dense.weight"]
            )
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) / 10)
            known[kind] = adapted(ids).logits
        folder = root / f"classes-{kind}"
        adapted.save_pretrained(folder) if kind == "lora" else save_adapter(adapted, folder)
        (folder / "training_summary.json").write_text(json.dumps({"task": "text-classification", "labels": LABELS}))
    torch.save(known, root / "adapters.pt")


def sha(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def pushed(folders, tmp_path_factory):
    """Everything that talks to the Hub; and further clients of it, each a script in a process of its own."""
    run_folder, later = str(folders / "run"), folders / "later"
    with Hub() as hub:
        hub.part_size["user/whole"] = 2000
        broken = f"/lfs/{sha(later / 'model.safetensors')}"
        hub.fail = lambda method, path: 400 if method == "PUT" and path == broken else None
        writer, stranger = "hf_writer", "hf_stranger"
        hub.repos["user/hand"] = Repo()
        hub.repos["user/hand"].commit("main", {"README.md": b"# By hand\n"}, "mine")
        steps = {
            "dry": (None, ["push", run_folder, "--repo", "user/tiny", "--dry-run"]),
            "first": (writer, ["push", run_folder, "--repo", "user/tiny", "--license", "apache-2.0"]),
            "whole": (writer, ["push", run_folder, "--repo", "user/whole", "--private", "--self-contained"]),
            "branch": (writer, ["push", run_folder, "--repo", "user/tiny", "--revision", "trial", "--tag", "mine"]),
            "request": (
                stranger,
                ["push", run_folder, "--repo", "user/tiny", "--create-pr", "--commit-message", "Hi"],
            ),
            "stranger": (stranger, ["push", run_folder, "--repo", "user/tiny"]),
            "private": (stranger, ["push", run_folder, "--repo", "user/whole"]),
            "wrong": ("hf_wrong", ["push", run_folder, "--repo", "user/tiny"]),
            "none": (None, ["push", run_folder, "--repo", "user/tiny"]),
            "broken": (writer, ["push", str(later), "--repo", "user/tiny", "--license", "mit"]),
            "by hand": (writer, ["push", run_folder, "--repo", "user/hand"]),
            "lora": (
                writer,
                ["push", str(folders / "lora"), "--repo", "user/plain-lora", "--base-model", "user/tiny"],
            ),
            "local base": (writer, ["push", str(folders / "classes-lora"), "--repo", "user/refused"]),
            "local base, bottleneck": (writer, ["push", str(folders / "classes-houlsby"), "--repo", "user/refused"]),
            **{
                f"classes-{kind}": (
                    writer,
                    ["push", str(folders / f"classes-{kind}"), "--repo", f"user/{kind}", "--base_model", "user/tiny"],
                )
                for kind in ADAPTERS
            },
            "bottleneck": (writer, ["push", str(folders / "bottleneck"), "--repo", "user/bottleneck"]),
        }
        home = tmp_path_factory.mktemp("client")
        for loaded in ("models--somebody--start", "datasets--somebody--corpus"):  # what training took from the Hub
            (home / "hf" / "hub" / loaded).mkdir(parents=True)
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        clients = Forks(environment(home, **online))

        def client(code, *arguments, folder=home, **more):
            done = clients.run(code, *arguments, folder=folder, **more)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            return done.stdout

        printed = client(COMMANDS, json.dumps(list(steps.values())))
        results = dict(zip(steps, json.loads(printed.splitlines()[-1])))
        yield SimpleNamespace(hub=hub, results=results, folders=folders, client=client)
        clients.close()


def front(text):
    return yaml.safe_load(text.split("---")[1])


def test_push(pushed, folders):
    code, printed = pushed.results["first"]
    assert code == 0 and "/user/tiny/commit/" in printed, printed
    files = pushed.hub.repos["user/tiny"].commits
    first = next(entry for entry in list(files.values())[1:])
    models = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(first) == [".gitattributes", "README.md", *models]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert first[name] == (folders / "run" / name).read_bytes()
    assert not pushed.hub.repos["user/tiny"].private
    card = first["README.md"].decode()
    data = front(card)
    assert data["license"] == "apache-2.0" and data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "fill-mask" and {"hf_xformers", "xf_bert"} <= set(data["tags"])
    assert data["base_model"] == "somebody/start" and data["datasets"] == ["somebody/corpus"]
    result = data["model-index"][0]["results"][0]
    assert result["dataset"]["type"] == "custom" and result["dataset"]["split"] == "validation"
    assert {"type": "perplexity", "value": 190.5} == {
        key: next(m for m in result["metrics"] if m["type"] == "perplexity")[key] for key in ("type", "value")
    }
    assert "/secret" not in card and "notes.txt" in card and "| steps | 26 |" in card
    parsed = ModelCard(card).data.eval_results
    assert {entry.metric_type for entry in parsed} == {"loss", "perplexity"}


def test_dry_run(pushed):
    code, printed = pushed.results["dry"]
    assert code == 0 and "model.safetensors" in printed and "library_name: transformers" in printed
    assert "optimizer" not in printed and "x.py" not in printed
    assert "the card names no license" in printed
    assert pushed.hub.log[0] != "" and pushed.hub.repos["user/tiny"].messages[1] == "Upload with hf-xformers"


def test_branch_and_pull_request(pushed):
    repo = pushed.hub.repos["user/tiny"]
    assert pushed.results["branch"][0] == pushed.results["request"][0] == 0, pushed.results["request"][1]
    assert "mine" in front(pushed.hub.files("user/tiny", "trial")["README.md"].decode())["tags"]
    assert "mine" not in pushed.hub.files("user/tiny")["README.md"].decode()
    assert any(branch.startswith("refs/pr/") for branch in repo.branches) and "Hi" in repo.messages
    assert "/discussions/" in pushed.results["request"][1]


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ("stranger", "this token may not write to 'user/tiny'"),
        ("private", "this token may not write to 'user/whole'"),
        ("wrong", "hf auth login"),
        ("none", "there is no token of the Hub on this machine"),
    ],
)
def test_refused(pushed, step, match):
    code, printed = pushed.results[step]
    assert code == 2 and match in printed and "Traceback" not in printed, printed


def test_broken_upload(pushed, folders):
    code, printed = pushed.results["broken"]
    assert code == 2 and "the Hub answered 400" in printed and "no commit was made" in printed, printed
    files = pushed.hub.files("user/tiny")
    assert files["model.safetensors"] == (folders / "run" / "model.safetensors").read_bytes()
    assert "license: mit" not in files["README.md"].decode()


def test_adapters(pushed, folders):
    for name, weights in (("plain-lora", "adapter_model.safetensors"), ("bottleneck", "bottleneck.safetensors")):
        step = name.removeprefix("plain-")
        assert pushed.results[step][0] == 0, pushed.results[step][1]
        files = pushed.hub.files(f"user/{name}")
        assert [path for path in files if path.endswith(".safetensors")] == [weights] and "config.json" not in files
    data = front(pushed.hub.files("user/plain-lora")["README.md"].decode())
    assert data["library_name"] == "peft" and data["base_model"] == "user/tiny"
    assert data["base_model_relation"] == "adapter"
    assert "bottleneck-adapter" in front(pushed.hub.files("user/bottleneck")["README.md"].decode())["tags"]


def test_no_place_of_this_machine_is_pushed(pushed, folders):
    for step in ("local base", "local base, bottleneck"):
        code, printed = pushed.results[step]
        assert code == 2 and str(folders / "run") in printed and "--base-model USER/NAME" in printed, printed
    assert "user/refused" not in pushed.hub.repos
    for kind in ADAPTERS:
        file = "adapter_config.json" if kind == "lora" else "bottleneck_config.json"
        assert pushed.results[f"classes-{kind}"][0] == 0, pushed.results[f"classes-{kind}"][1]
        files = pushed.hub.files(f"user/{kind}")
        assert all(str(folders).encode() not in content for content in files.values())
        about = json.loads(files[file])
        assert about["base_model_name_or_path" if kind == "lora" else "base_model"] == "user/tiny"
        local = json.loads((folders / f"classes-{kind}" / file).read_text())
        assert set(local) == set(about) and str(folders / "run") in local.values()  # the folder stays as it was


def test_what_was_pushed_gives_what_was_saved(pushed, folders, tmp_path):
    """A fusion with its adapters, and a network beside the layers, from the files that the Hub has."""
    from transformers import AutoModelForSequenceClassification

    known = torch.load(folders / "adapters.pt")
    for kind in ("fusion", "k_adapter"):
        place = tmp_path / kind
        place.mkdir()
        for name, content in pushed.hub.files(f"user/{kind}").items():
            (place / name).write_bytes(content)
        data = front((place / "README.md").read_text())
        assert data["base_model"] == "user/tiny" and "bottleneck-adapter" in data["tags"]
        names = dict(enumerate(LABELS))
        model = AutoModelForSequenceClassification.from_pretrained(folders / "run", id2label=names)
        load_adapter(model, place)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(known["ids"]).logits, known[kind], atol=1e-6, rtol=1e-5)


SNIPPET = """
import sys, torch
known = torch.load(sys.argv[2])
exec(open(sys.argv[1]).read())
with torch.no_grad():
    found = model.eval()(known["ids"]).logits
torch.testing.assert_close(found, known[sys.argv[3]], atol=1e-6, rtol=1e-5)
print("labels", list(model.config.id2label.values()), len(model.config.label2id))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "houlsby"])
def test_the_snippet_of_an_adapter(kind, pushed, folders, tmp_path):
    """What the card says, run as it stands against the Hub, gives the logits of the model that was saved."""
    card = pushed.hub.files(f"user/{kind}")["README.md"].decode()
    script = tmp_path / "snippet.py"
    script.write_text(card.split("```python\n")[1].split("```")[0])
    assert f"labels {LABELS} 3" in pushed.client(SNIPPET, str(script), str(folders / "adapters.pt"), kind)


def test_the_base_is_named_by_its_id(tmp_path):
    """A base in the Hub's cache, or in a folder whose card was generated for a push, has a name there."""
    cached = tmp_path / "models--somebody--bert" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    assert public_base(str(cached)) == "somebody/bert"
    base = tmp_path / "base"
    make_model().save_pretrained(base)
    assert public_base(str(base)) is None and public_base("nobody/knows") is None
    (base / "README.md").write_text(prepare_upload(base, "user/base").card)
    assert public_base(str(base)) == "user/base"


@pytest.mark.parametrize(
    "reference, file",
    [
        ("{secret}/settings.C", "config.json"),
        ("../settings.C", "tokenizer_config.json"),
        ("a/../../settings.C", "config.json"),
        ("{secret}--settings.C", "config.json"),
        ("./x--settings.C", "tokenizer_config.json"),
    ],
)
def test_code_outside_the_folder(reference, file, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    for place in (secret, tmp_path):
        (place / "settings.py").write_text("password = 1\n")
    make_model().save_pretrained(tmp_path / "m")
    path, reference = tmp_path / "m" / file, reference.format(secret=secret)
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoConfig": reference}}))
    for act in (lambda: prepare_upload(tmp_path / "m", "user/m"), lambda: bundle(tmp_path / "m", tmp_path / "out")):
        with pytest.raises(ValueError, match="is no file of the folder") as error:
            act()
        assert repr(reference) in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "link", ["LICENSE.txt", "README.md", "tokenizer.json", "mine.py", "settings.py", "model.safetensors"]
)
def test_links_are_not_followed(link, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("password")
    folder = tmp_path / "m"
    make_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "mine.C"}}))
    (folder / "mine.py").write_text("from .settings import C\nfrom ./../../secret import x\n")
    (folder / "settings.py").write_text("C = 1\n")
    assert {"mine.py", "settings.py"} <= set(prepare_upload(folder, "user/m").files)
    if link == "model.safetensors":
        shutil.copy(folder / link, secret)  # what is damaged is refused as that
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(secret)
    for act in (lambda: prepare_upload(folder, "user/m"), lambda: bundle(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match="is a link to") as error:
            act()
        assert link in str(error.value)


def test_the_cache_of_the_hub_is_links(tmp_path):
    make_model().save_pretrained(tmp_path / "m")
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate((tmp_path / "m").iterdir()):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert "model.safetensors" in prepare_upload(snapshot, "user/m").files


@pytest.mark.slow
def test_loads_from_the_hub(pushed, folders, tmp_path):
    """With the package the plain repository and `push_to_hub`; without it the self-contained one. Equal bit for
    bit."""
    known, where = str(folders / "known.pt"), {"folder": tmp_path, "HF_TOKEN": "hf_writer"}
    pushed.client(LOAD, "installed", known, **where)
    data = front(pushed.hub.files("user/plain")["README.md"].decode())
    assert {"hf_xformers", "xf_bert"} <= set(data["tags"])
    assert pushed.hub.repos["user/whole"].private
    printed = pushed.client(WITHOUT_PACKAGE + LOAD, "alone", known, **where)
    assert "loaded transformers_modules.user.whole." in printed


@pytest.mark.slow
def test_the_snippet_of_a_self_contained_model(pushed, folders, tmp_path):
    """It loads model and tokenizer where the package is not installed, and nothing asks anything."""
    card = pushed.hub.files("user/whole")["README.md"].decode()
    snippet = card.split("```python\n")[1].split("```")[0]
    check = "assert tokenizer(['a b']).input_ids == [[2, 1]] and type(model).__name__ == 'XFBertForMaskedLM'\n"
    pushed.client(WITHOUT_PACKAGE + snippet + check, folder=tmp_path, HF_TOKEN="hf_writer")


def test_cards_by_hand_stay(pushed, folders, tmp_path, capsys):
    """A card in the folder is taken; a generated one and a library's template are made anew. One in the repository
    stays."""
    files = pushed.hub.files("user/hand")
    assert files["README.md"] == b"# By hand\n" and "model.safetensors" in files
    target = bundle(folders / "run", tmp_path / "out")
    generated = prepare_upload(target, "user/x")
    assert generated.card_is_generated and "trust_remote_code=True" in generated.card
    assert any(name == "modeling_xformer.py" for name in generated.files)
    (target / "README.md").write_text(generated.card)
    assert prepare_upload(target, "user/x").card_is_generated
    (target / "README.md").write_text("# By hand\n")
    assert prepare_upload(target, "user/x").card == "# By hand\n"
    assert main(["push", str(target), "--repo", "user/x", "--license", "mit", "--dry-run"]) == 0
    assert "README.md in the folder is the card as it is, without --license" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("---\nlicense: mit\n---\n# By hand\n\n---\n", True),
        ("# By hand\n\n| a |\n|---|\n", True),
        ("---\nlicense: mit\n---\n", False),
    ],
)
def test_a_card_in_the_repository_that_somebody_wrote(text, own, tmp_path):
    (tmp_path / "README.md").write_text(text)
    api = SimpleNamespace(hf_hub_download=lambda *_, **__: tmp_path / "README.md")
    assert _has_own_card(api, "user/x", None) is own


@pytest.mark.parametrize("head", ["Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering"])
def test_pipeline_of_heads(head, tmp_path):
    cls = config_class("gpt2")
    family("gpt2")[head](cls(**tiny_fields(cls, "decoder"))).save_pretrained(tmp_path / "m")
    card = prepare_upload(tmp_path / "m", "user/m").card
    tags = {
        "Model": "feature-extraction",
        "ForCausalLM": "text-generation",
        "ForSequenceClassification": "text-classification",
        "ForQuestionAnswering": None,  # transformers has no such pipeline
    }
    assert front(card).get("pipeline_tag") == tags[head] and "model-index" not in front(card)
    assert ("question-answering" in front(card)["tags"]) == (head == "ForQuestionAnswering")
    assert "AutoModelF" + head[1:] in card or head == "Model"


@pytest.mark.parametrize(
    ("variant", "head", "auto", "task"),
    [
        ("informer", "ForTimeSeriesPrediction", "AutoModelForTimeSeriesPrediction", "time-series-forecasting"),
        ("electra", "ForReplacedTokenDetection", "AutoModelForPreTraining", None),
        ("image_gpt", "ForCausalLM", "AutoModelForCausalLM", None),  # which writes no text
    ],
)
def test_heads_without_a_pipeline(variant, head, auto, task, tmp_path):
    cls = config_class(variant)
    family(variant)[head](cls(**tiny_fields(cls))).save_pretrained(tmp_path / "m")
    card = prepare_upload(tmp_path / "m", "user/m").card
    known = {"text-generation", "feature-extraction", "time-series-forecasting"} & set(front(card)["tags"])
    assert "pipeline_tag" not in front(card) and known == ({task} if task else set())
    assert f"{auto}.from_pretrained" in card


def test_every_file_of_a_tokenizer_belongs_to_the_checkpoint(tmp_path):
    make_model().save_pretrained(tmp_path)
    names = {"source.spm", "target.spm", "target_vocab.json", "spm.model", "sentencepiece.bpe.model", "bpe.codes"}
    for name in names:
        (tmp_path / name).write_text("of a tokenizer")
    assert names < set(prepare_upload(tmp_path, "user/tiny").files)


def test_shards(tmp_path):
    make_model().save_pretrained(tmp_path / "m", max_shard_size="30KB")
    upload = prepare_upload(tmp_path / "m", "user/m")
    shards = [name for name in upload.files if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors.index.json" in upload.files
    parameters = make_model().num_parameters()
    assert f"| parameters | {parameters:,} |" in upload.card


def test_models_of_transformers(tmp_path):
    """They are pushed as they are; their card says what is known, and they have no code to go with."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)).save_pretrained(tmp_path / "m")
    card = prepare_upload(tmp_path / "m", "user/m").card
    assert front(card)["pipeline_tag"] == "text-generation" and "AutoModelForCausalLM" in card
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(**sizes, vocab_size=9)).save_pretrained(tmp_path / "m")
    card = prepare_upload(tmp_path / "m", "user/m").card
    assert front(card)["pipeline_tag"] == "fill-mask" and "import hf_xformers" not in card
    with pytest.raises(ValueError, match="none of this package's"):
        prepare_upload(tmp_path / "m", "user/m", self_contained=True)


def test_wrong_input(folders, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for arguments, match in (
        ([str(tmp_path / "empty"), "--repo", "user/x"], "is no checkpoint"),
        ([str(tmp_path / "nowhere"), "--repo", "user/x"], "there is no folder"),
        ([str(folders / "run"), "--repo", "no spaces/x"], "is no repository of the Hub"),
        ([str(folders / "run"), "--repo", "x"], "give USER/NAME"),
        ([str(folders / "lora"), "--repo", "user/x", "--self-contained"], "is an adapter"),
        ([str(folders / "run")], "--repo"),
    ):
        assert main(["push", *arguments]) == 2
        assert match in capsys.readouterr().err
    assert main(["bundle", str(folders / "run"), "--to", str(tmp_path / "b")]) == 0
    assert "code files" in capsys.readouterr().out and (tmp_path / "b" / "modeling_xformer.py").exists()


def test_no_connection():
    from huggingface_hub.errors import HTTPError

    with pytest.raises(ValueError, match="cannot be reached or broke off .no route"), _plain_errors("user/x"):
        raise HTTPError("no route to host")
    with pytest.raises(KeyError), _plain_errors("user/x"):  # a bug stays one
        raise KeyError("x")


def test_tasks_that_transformers_has():
    from transformers.pipelines import SUPPORTED_TASKS

    from hf_xformers.families import HEADS
    from hf_xformers.hub.card_metadata import TASKS

    assert set(TASKS) <= set(HEADS) and {task for task in TASKS.values() if task} <= set(SUPPORTED_TASKS)


# -------------------------------------------------------------------------------------------------- where it came from


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A BERT of transformers swapped to Longformer's attention and Performer in one layer, and swapped back."""
    from transformers import BertConfig, BertForMaskedLM

    root = tmp_path_factory.mktemp("swapped")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=60, max_position_embeddings=20, **sizes)).save_pretrained(root / "theirs")
    layers = json.dumps({"1": {"attention": "performer"}})
    for arguments in (
        ["--from", root / "theirs", "--to", root / "long", "--attention", "longformer"],
        ["--from", root / "long", "--to", root / "longer", "--max-length", "40", "--per-layer-config", layers],
        ["--from", root / "long", "--to", root / "again", "--attention", "dense"],
        ["--from", root / "theirs", "--to", root / "ours"],
    ):
        assert main(["convert", *map(str, arguments)]) == 0
    return root


def test_card_of_a_swap(swapped, monkeypatch):
    from hf_xformers.hub import origin_card

    card = prepare_upload(swapped / "longer", "user/m").card
    assert "freely mixed" not in card and str(swapped) not in card
    assert "`XFormerForMaskedLM`: a trained `BertForMaskedLM` (Devlin et al." in card
    for part in ("attention `performer` in place of `dense`", "`attention`: dense -> longformer", ": tensors "):
        assert part in card, part
    assert "outputs, before any further training: KL" in card and "`max_position_embeddings`: 20 -> 40" in card
    for paper in (
        "Longformer: The Long-Document Transformer",
        "Rethinking Attention with {P}erformers",
        "{BERT}: Pre-training",
    ):
        assert paper in card.split("## Citation")[1]
    assert "base_model" not in front(card)
    monkeypatch.setattr(origin_card, "is_hub_id", lambda name, kind: True)  # as if it had come from the Hub
    data = front(prepare_upload(swapped / "longer", "user/m").card)
    assert data["base_model"] == str(swapped / "theirs")
    assert "converted" in prepare_upload(swapped / "ours", "user/m").card


@pytest.mark.parametrize("name", ["llama", "mpnet", "m2m_100"])
def test_card_of_a_family_that_no_variant_is_named_after(name, tmp_path):
    """A model that is only converted is said to be that, and a swap names what it took away, not a default."""
    entry = architectures()[name]
    entry.make(next(iter(entry.heads))).save_pretrained(tmp_path / "theirs")
    sides = {"from": tmp_path / "theirs", "to": tmp_path / "ours"}
    assert main(["convert", *(str(part) for key, value in sides.items() for part in (f"--{key}", value))]) == 0
    card = prepare_upload(tmp_path / "ours", "user/m").card
    assert f"a trained `{next(iter(entry.heads))}`, converted." in card
    assert "in place of" not in card and "## Mechanism" not in card
    if name != "llama":
        return
    swap = ["--from", tmp_path / "ours", "--to", tmp_path / "new", "--attention", "performer"]
    assert main(["convert", *map(str, swap), "--position", "none"]) == 0
    card = prepare_upload(tmp_path / "new", "user/m").card
    what = "position `none` in place of `rotary`, attention `performer` in place of `dense`."
    assert f"a trained `LlamaModel` with {what}" in card


def test_training_hands_on_where_a_model_came_from(swapped, tmp_path):
    from hf_xformers.conversion.provenance import carry_provenance, read_provenance

    (tmp_path / "run").mkdir()
    carry_provenance(str(swapped / "longer"), tmp_path / "run")
    found = read_provenance(tmp_path / "run")
    assert [step.variants for step in found.steps()] == [("xf_bert", "xformer"), ("xformer", "xformer")]
    carry_provenance(str(swapped / "theirs"), tmp_path / "run")  # says nothing
    assert read_provenance(tmp_path / "run") is None


def test_back_to_the_family_it_came_from(swapped, tmp_path, capsys):
    """With its components again a swapped model is one of transformers' again, of the same numbers."""
    from transformers import AutoModelForMaskedLM

    assert main(["convert", "--from", str(swapped / "again"), "--to", str(tmp_path / "back")]) == 0
    ids = torch.arange(5, 15)[None]
    before, after = (
        AutoModelForMaskedLM.from_pretrained(place).eval() for place in (swapped / "theirs", tmp_path / "back")
    )
    assert type(after) is type(before)
    with torch.no_grad():
        torch.testing.assert_close(after(ids).logits, before(ids).logits, atol=1e-5, rtol=1e-5)
    capsys.readouterr()
    assert main(["convert", "--from", str(swapped / "long"), "--to", str(tmp_path / "no")]) == 2
    assert "has attention 'longformer', which that family does not have; swap it back" in capsys.readouterr().err


def test_card_of_a_free_mix(tmp_path):
    cls = config_class("xformer")
    model = family("xformer")["ForCausalLM"](cls(**{**tiny_fields(cls, "decoder"), "attention": "performer"}))
    model.save_pretrained(tmp_path / "m")
    card = prepare_upload(tmp_path / "m", "user/m").card
    assert "a Transformer with attention `performer` in place of `dense`" in card and "## Mechanism" in card
    assert "Rethinking Attention with {P}erformers" in card and "A Survey of Transformers" in card


def test_metadata(folders, tmp_path):
    """An example to try with the tokenizer's own mask, the metrics, and what the model was trained on."""
    shutil.copytree(folders / "run", tmp_path / "m")
    data = front(prepare_upload(tmp_path / "m", "user/m").card)
    assert data["metrics"] == ["perplexity"] and "widget" not in data  # its tokenizer has no mask
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": "<gap>"}))
    data = front(prepare_upload(tmp_path / "m", "user/m").card)
    assert "<gap>" in data["widget"][0]["text"]
    summary = json.loads((tmp_path / "m" / "training_summary.json").read_text())
    summary |= {"distillation": {"teacher": "/secret/big-teacher"}, "eval_accuracy": 0.5}
    (tmp_path / "m" / "training_summary.json").write_text(json.dumps(summary))
    card = prepare_upload(tmp_path / "m", "user/m").card
    assert "| teacher | big-teacher |" in card and "/secret" not in card
    assert front(card)["metrics"] == ["perplexity", "accuracy"]
    assert "baseline" not in card


@pytest.mark.parametrize("name", ["baseline", "floor"])  # the second is that of 0.1.0
@pytest.mark.parametrize("kind", ["language", "task"])
def test_figures_stand_beside_their_baseline(kind, name, folders, tmp_path):
    """A language model's baselines are among its figures, a task's apart; neither is a score of the model."""
    shutil.copytree(folders / "run", tmp_path / "m")
    path = tmp_path / "m" / "training_summary.json"
    floors = {
        "language": {f"eval_{name}_loss": 6.5},
        "task": {f"{name}_validation": {"loss": 6.5}, "trivial": {"rule": "always 'gut'", "answer": "gut"}},
    }[kind]
    path.write_text(json.dumps({**json.loads(path.read_text()), **floors}))
    card = prepare_upload(tmp_path / "m", "user/m").card
    assert "| split | metric | value | baseline |" in card
    assert "| validation | loss | 5.25 | 6.5 |" in card and "| validation | perplexity | 190.5 |  |" in card
    assert ("*The baseline is what can be said without the model: always 'gut'.*" in card) == (kind == "task")
    scores = front(card)["model-index"][0]["results"][0]["metrics"]
    assert {score["type"] for score in scores} == {"loss", "perplexity"} and 6.5 not in [s["value"] for s in scores]
    assert 'AutoTokenizer.from_pretrained("user/m")' in card


def test_only_what_is_loaded_is_pushed(folders, tmp_path):
    """A shard that an earlier model has left is not."""
    shutil.copytree(folders / "run", tmp_path / "m")
    shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "m" / "model-00002-of-00003.safetensors")
    found = prepare_upload(tmp_path / "m", "user/m").files
    assert [name for name in found if "safetensors" in name] == ["model.safetensors"]
    (tmp_path / "m" / "model.safetensors").unlink()
    make_model().save_pretrained(tmp_path / "m", max_shard_size="5KB")
    shards = set(json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())["weight_map"].values())
    found = prepare_upload(tmp_path / "m", "user/m").files
    assert {name for name in found if "safetensors" in name} == {*shards, "model.safetensors.index.json"}


def test_a_bundle_names_its_class_has_a_card_and_mixes_with_nothing(folders, tmp_path, capsys):
    target = tmp_path / "out"
    command = ["bundle", str(folders / "run"), "--to", str(target)]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())  # long lines are wrapped
    auto = re.search(r'(AutoModelFor\w+)\.from_pretrained\(".*/out", trust_remote_code=True\)', said)[1]
    assert json.loads((target / "config.json").read_text())["architectures"] == ["XFBertFor" + auto[12:]]
    card = (target / "README.md").read_text()
    assert f'{auto}.from_pretrained("out", trust_remote_code=True)' in card
    (target / "README.md").write_text("# Mine\n")
    assert main(command) == 0 and (target / "README.md").read_text() == "# Mine\n"  # an earlier bundle
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert main([*command[:-1], str(tmp_path / "full")]) == 2
    assert "holds other files ('notes.txt'); give an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
