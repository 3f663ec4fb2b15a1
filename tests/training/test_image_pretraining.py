"""Pretraining on images by the command: patches and colors, floors, exact resume, pictures, what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import DatasetDict
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForMaskedImageModeling

from hf_xformers.cli import main
from hf_xformers.data.colors import color_processor, picture_of
from hf_xformers.data.images import divide_images, load_image_dataset
from hf_xformers.data.patch_processors import patch_processor
from hf_xformers.objectives import build_objective
from hf_xformers.training.image_pictures import PICTURES_FILE
from hf_xformers.training.image_trainer import patches_of
from tests.refused import refused
from tests.training.runs import flags, same_run, summary

Image = pytest.importorskip("PIL.Image")
datasets = pytest.importorskip("sklearn.datasets")

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "attention_probs_dropout_prob": 0.1,
    "per_device_train_batch_size": 16,
    "learning_rate": 5e-3,
    "logging_steps": 10,
    "eval_steps": 10,
    "disable_tqdm": "true",
    "validation_fraction": 0.2,
}
# A saved model has its own.
SAVED_SHAPE = dict.fromkeys(["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
KINDS = {
    "patches": {"variant": "vision_transformer", "patch_size": 2, "num_channels": 1}
    | {"eval_do_concat_batches": "false"},
    "colors": {"variant": "image_gpt"},
    "plane": {"variant": "image_transformer", "attention.local": "2d", "position.std": 0.02, "colors": 8}
    | {"attention.block_shape": "4,4", "attention.memory_flange": "4,4"},
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """scikit-learn's digits as a folder of images, in a folder for each class: N.png, of 8 x 8 pixels."""
    root = tmp_path_factory.mktemp("digits")
    data = datasets.load_digits()
    for number, (pixels, label) in enumerate(zip(data.images[:300], data.target)):
        place = root / str(label)
        place.mkdir(exist_ok=True)
        Image.fromarray((pixels * 15.9375).round().astype(np.uint8)).save(place / f"{number}.png")
    return root


def pretrain(digits, output, *extra, **options):
    assert main(["pretrain", *flags(**{**SHAPE, "data": digits, "output_dir": output, **options}), *extra]) == 0
    return output


@pytest.fixture(scope="module")
def runs(digits, tmp_path_factory):
    """Every kind, trained for 40 steps with checkpoints on the way."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: pretrain(digits, folder / name, **options, max_steps=40, save_steps=20)
        for name, options in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_out_costs_less_than_its_floor(runs, kind):
    found = summary(runs[kind])
    assert found["status"] == "finished" and found["train_rows"] + found["validation_rows"] == 300
    # So short a run learns no more of hidden patches than the baseline knows.
    assert kind == "patches" or found["eval_loss"] < 0.9 * found["eval_baseline_loss"], found
    tokens = {"patches": 16, "colors": 65, "plane": 64}[kind]
    assert found["block_size"] == tokens and found["vocabulary"] == {"patches": None, "colors": 17, "plane": 8}[kind]
    picture = Image.open(runs[kind] / PICTURES_FILE)
    assert picture.size == (3 * 100 + 4, 8 * 100 + 4)  # 8 images of 8 x 8 pixels, zoomed 12 times, in 3 columns
    left = np.asarray(picture)[4:100, 4:100]
    assert left.max() > 200 and left.min() < 50


def test_the_error_of_hidden_pixels_and_its_floor(runs, digits):
    """By loops over patches, from the saved model and processor; the floor is the median of each pixel."""
    model = AutoModelForMaskedImageModeling.from_pretrained(runs["patches"]).eval()
    processor = AutoImageProcessor.from_pretrained(runs["patches"])
    parts = load_image_dataset([str(digits)], validation_fraction=0.2)
    scaled = {
        name: torch.cat(
            [processor(images=image.convert("L"), return_tensors="pt")["pixel_values"] for image in rows["image"]]
        )
        for name, rows in parts.items()
    }
    usual = scaled["train"].sort(0).values[(len(scaled["train"]) - 1) // 2]  # the lower of the two in the middle
    collator = build_objective("masked_image").collator(processor, seed=42, static=True, patch=(2, 2))
    images = [torch.from_numpy(np.array(image.convert("L")))[None] for image in parts["validation"]["image"]]
    batch = collator([{"pixel_values": image} for image in images])
    torch.testing.assert_close(batch["pixel_values"], scaled["validation"])
    with torch.no_grad():
        made = model(**batch).reconstruction
    errors, floors = [], []
    for image, guess, mask in zip(batch["pixel_values"], made, batch["bool_masked_pos"]):
        assert mask.sum() == 10  # 60 % of 16
        for place in mask.nonzero().flatten().tolist():
            row, column = 2 * (place // 4), 2 * (place % 4)
            cut = (0, slice(row, row + 2), slice(column, column + 2))
            errors.append((image[cut] - guess[cut]).abs().mean().item())
            floors.append((image[cut] - usual[cut]).abs().mean().item())
    found = summary(runs["patches"])
    assert found["eval_loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert found["eval_baseline_loss"] == pytest.approx(np.mean(floors), rel=1e-5)
    flat = [(scaled["validation"] - level).abs().mean().item() for level in np.linspace(-1, 1, 21)]
    assert found["eval_baseline_loss"] < 0.8 * min(flat)  # which is far below any picture of one grey


def test_colors_are_stored_with_the_model(runs, digits):
    """The saved processor and model give the held-out figure again; the floor is the colors' own entropy."""
    model = AutoModelForCausalLM.from_pretrained(runs["colors"]).eval()
    processor = AutoImageProcessor.from_pretrained(runs["colors"])
    held = load_image_dataset([str(digits)], validation_fraction=0.2)["validation"]["image"]
    ids = torch.as_tensor(np.stack(processor(images=[image.convert("RGB") for image in held])["input_ids"]))
    rows = torch.cat([torch.full((len(ids), 1), model.config.bos_token_id), ids], dim=1)
    with torch.no_grad():
        scores = model(rows).logits.double().log_softmax(-1)[:, :-1]
    found = summary(runs["colors"])
    assert found["eval_loss"] == pytest.approx(-scores.gather(2, ids[..., None]).mean().item(), rel=1e-5)
    share = torch.bincount(ids.flatten()).double() / ids.numel()
    share = share[share > 0]
    assert found["eval_baseline_loss"] == pytest.approx(-(share * share.log()).sum().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["colors", "plane"])
def test_pictures_go_row_by_row(runs, digits, kind):
    """Whatever order the model reads pixels in, the left column has held-out images in their clusters' colors, and
    the others begin with the half that is given."""
    processor = AutoImageProcessor.from_pretrained(runs[kind])
    held = load_image_dataset([str(digits)], validation_fraction=0.2)["validation"]["image"]
    sheet = np.asarray(Image.open(runs[kind] / PICTURES_FILE))
    for row in range(8):
        image = held[row * len(held) // 8].convert("RGB")
        ids = np.asarray(processor(images=[image])["input_ids"][0])
        truth, middle, right = (sheet[4 + 100 * row : 100 + 100 * row, 4 + x : 100 + x] for x in (0, 100, 200))
        expected = np.asarray(picture_of(ids, processor.clusters, (8, 8), zoom=12))
        assert np.array_equal(truth, expected)
        assert np.array_equal(middle[:48], truth[:48]) and np.array_equal(right[:48], truth[:48])
        assert np.ptp(middle[48:]) == 0  # hidden


@pytest.mark.parametrize("kind", ["patches", "colors"])
def test_resume_is_exact(runs, digits, tmp_path, kind):
    """A run that ended at the checkpoint in its middle goes on to the same weights and the same log."""
    output, whole = tmp_path / "run", runs[kind]
    output.mkdir()
    for path in whole.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            (output / path.name).write_bytes(path.read_bytes())
    shutil.copytree(whole / "checkpoint-20", output / "checkpoint-20")
    pretrain(digits, output, "--resume_from_checkpoint", **KINDS[kind], max_steps=40, save_steps=20)
    same_run(output, whole)


def test_a_saved_model_goes_on_with_its_colors(runs, digits, tmp_path):
    output = pretrain(digits, tmp_path / "run", init_from=runs["colors"], max_steps=1, **SAVED_SHAPE)
    first, again = (
        json.loads((folder / "preprocessor_config.json").read_text()) for folder in (runs["colors"], output)
    )
    assert first["clusters"] == again["clusters"]
    assert summary(output)["eval_loss"] < 1.2 * summary(runs["colors"])["eval_loss"]


def test_saved_datasets_and_parquet_are_images_too(digits, tmp_path):
    rows = load_image_dataset([str(digits)], validation_fraction=0)["train"].select(range(20))
    rows.rename_column("image", "picture").save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("saved", "rows.parquet"):
        found = load_image_dataset([str(tmp_path / name)], validation_fraction=0.2)
        assert set(found) == {"train", "validation"} and len(found["train"]) + len(found["validation"]) == 20
        assert found["train"].column_names == ["image"] and found["train"][0]["image"].size == (8, 8)
    train, held = divide_images(rows, "image", 0.2)
    assert len(train) + len(held) == 20
    shards = [str(tmp_path / f"{split}-00000-of-00001.parquet") for split in ("train", "validation")]
    for part, shard in zip((train, held), shards):
        part.to_parquet(shard)
    assert len(load_image_dataset(shards)["validation"]) == len(held)


def test_folders_of_odd_names_and_with_a_run_in_them(tmp_path):
    place = tmp_path / "photos [1]"
    (place / "run").mkdir(parents=True)
    (place / "run" / "training_summary.json").write_text("{}")
    (place / "train.csv").write_text("id,label\n1,2\n")
    for name in ("a.png", "b.png", f"run/{PICTURES_FILE}"):
        Image.new("L", (8, 8)).save(place / name)
    rows = load_image_dataset([str(place)], validation_fraction=0)["train"]
    assert len(rows) == 2
    with pytest.raises(ValueError, match="is that of a training run"):
        load_image_dataset([str(place / "run")])
    with pytest.raises(ValueError, match="config_name='x' is for Hub datasets"):
        load_image_dataset([str(place)], config_name="x")
    DatasetDict({"test": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"no split 'train'; choose one of \['test', 'validation'\]"):
        load_image_dataset([str(tmp_path / "saved")])
    assert len(load_image_dataset([str(tmp_path / "saved")], split="test[:1]", validation_fraction=0)["train"]) == 1


def test_hidden_patches_depend_on_seed_epoch_and_image_alone():
    objective = build_objective({"type": "masked_image", "mask_ratio": 0.5, "mask_size": 2})
    processor = patch_processor((8, 16), 1)
    images = [torch.full((1, 8, 16), value, dtype=torch.uint8) for value in (1, 2, 3)]
    collator = objective.collator(processor, seed=0, patch=(2, 2))

    def masks(*chosen, made=collator):
        return made([{"pixel_values": images[index]} for index in chosen])["bool_masked_pos"]

    first = masks(0, 1, 2)
    assert first.shape == (3, 32) and torch.equal(first.sum(1), torch.tensor([16, 16, 16]))
    squares = patches_of(first.view(3, 1, 4, 8), (2, 2)).flatten(2)
    assert bool((squares == squares[..., :1]).all())  # hidden in squares of 2 x 2 patches
    assert torch.equal(masks(2, 0), first[[2, 0]])
    collator.set_epoch(1)
    assert not torch.equal(masks(0, 1, 2), first)
    assert torch.equal(masks(0, 1, 2, made=collator.as_static()), first)
    patches = patches_of(torch.arange(16.0).view(1, 1, 4, 4), (2, 2))
    assert patches[0, :, 0].flatten(1).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_what_is_refused(digits, runs, tmp_path, capsys, text):
    def said(data=digits, *extra, output=tmp_path / "out", **options):
        given = flags(**{**SHAPE, "data": data, "output_dir": output, "max_steps": 1, **options})
        return refused(capsys, "pretrain", *given, *extra)

    empty, mixed = tmp_path / "empty", tmp_path / "mixed"
    empty.mkdir(), mixed.mkdir()
    for side in (8, 9):
        for number in range(3):
            Image.new("L", (side, 8), number).save(mixed / f"{side}-{number}.png")
    patches, colors = KINDS["patches"], KINDS["colors"]
    assert "is a folder without images" in said(empty, **colors)
    assert "have 2 sizes (8 x 8, 8 x 9 pixels); give one to all with --resize" in said(mixed, **colors)
    assert "the images have 8 x 8 pixels, and the model reads 32 x 32" in said(**patches, image_size=32)
    assert "without images" in said(text, **colors) and "this model reads images" in said(text, **patches)
    assert "there are none; give a folder of them with --data" in said(None, **colors)
    assert "is a folder of images, and variant 'xf_bert' reads text" in said(variant="bert")
    assert "--resize is about images" in said(text, variant="bert", resize=8)
    assert "the model reads 8 x 8; give --resize 8 8" in said(init_from=runs["colors"], resize=4, **SAVED_SHAPE)
    assert "have 17 colors, fewer than 40 clusters" in said(**colors, colors=40)
    assert "reads patches" in said(**patches, colors=4)
    assert "is about text" in said(**colors, block_size=8) and "is about text" in said(**colors, encoding="latin-1")
    assert "follows from the colors" in said(**colors, vocab_size=8)
    assert "positions for 9" in said(**colors, max_position_embeddings=9)
    assert "mask_size 3 x 3" in said(digits, "--objective.mask_size", "3", **patches)
    assert "objective 'mlm' does not train on images" in said(**KINDS["plane"], objective="mlm")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no image")
    (broken / "b.png").write_bytes(b"neither")
    assert "cannot be read" in said(broken, **colors)
    cut = tmp_path / "cut"
    cut.mkdir()
    for name in ("a", "b", "c"):
        noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(cut / f"{name}.png")
    (cut / "b.png").write_bytes((cut / "b.png").read_bytes()[:6000])
    for kind in (colors, {**patches, "patch_size": 8}):
        message = said(cut, output=tmp_path / "fresh", **kind)
        assert "cut/b.png) cannot be read" in message and "replace it or remove it" in message
        assert not list((tmp_path / "fresh").glob("*"))  # nothing has begun
    for run in runs.values():
        message = refused(capsys, "prune", *flags(model=run, output_dir=tmp_path / "cut"), "--method", "weights")
        assert "reads images" in message and "`hf-xformers finetune` gives it a task" in message


def test_published_sizes_read_one_pixel_less(digits, tmp_path):
    """A model with as many positions as pixels writes the last one and never reads it."""
    from hf_xformers.variants.image_gpt import XFImageGPTConfig, XFImageGPTForCausalLM

    sizes = {name: SHAPE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = XFImageGPTConfig(**sizes, intermediate_size=64, vocab_size=9, bos_token_id=8, max_position_embeddings=64)
    XFImageGPTForCausalLM(config).save_pretrained(tmp_path / "start")
    clusters = torch.linspace(-1, 1, 8)[:, None].expand(8, 3)
    color_processor(clusters, (8, 8)).save_pretrained(tmp_path / "start")
    output = pretrain(digits, tmp_path / "run", **SAVED_SHAPE, init_from=tmp_path / "start", max_steps=1)
    assert summary(output)["block_size"] == 64 and (output / PICTURES_FILE).is_file()
