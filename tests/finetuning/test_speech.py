"""Speech recognition from WAV files: words spelt in tones are learnt; and what is refused."""

import json
import wave

import numpy as np
import pytest
import torch
from transformers import AutoModelForCTC, AutoProcessor, pipeline

from examples.sounds import spell_in_tones, write_tone_speech, write_wav
from hf_xformers.cli import main
from hf_xformers.finetuning import TaskData
from hf_xformers.finetuning.origin import RowNames
from hf_xformers.finetuning.sound_rows import find_sound, load_sounds, read_sound
from hf_xformers.finetuning.tasks.speech import SoundCollator
from tests.refused import refused

RATE = 8000
OPTIONS = (
    "--task speech-recognition --variant conformer --num_mel_bins 24 --hidden_size 48 --num_hidden_layers 2"
    " --num_attention_heads 2 --intermediate_size 96 --block.conv_kernel 5 --embedding.channels 8 --use_cpu true"
    " --report_to none --warmup_steps 12 --learning_rate 8e-3 --hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
).split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("sounds")
    write_tone_speech(root / "train", 96, seed=1)
    write_tone_speech(root / "test", 24, seed=2)
    return root


@pytest.fixture(scope="module")
def run(folders, tmp_path_factory):
    """A model that was trained by the command."""
    target = tmp_path_factory.mktemp("run") / "model"
    data = ["--data", str(folders / "train"), "--test_data", str(folders / "test"), "--output_dir", str(target)]
    steps = "--num_train_epochs 10 --logging_steps 12 --per_device_train_batch_size 8 --eval_strategy no".split()
    assert main(["finetune", *OPTIONS, *data, *steps, "--validation_fraction", "0", "--save_strategy", "no"]) == 0
    return target


def test_words_are_learnt_and_stand_beside_their_floor(run):
    summary = json.loads((run / "training_summary.json").read_text())
    assert (summary["train_rows"], summary["test_rows"]) == (96, 24)
    floor = summary["baseline_test"]["wer"]
    assert summary["test_wer"] < 0.25 < 0.7 < floor <= 1.2, (summary["test_wer"], floor)
    assert summary["test_cer"] < summary["test_wer"] and summary["test_loss"] > 0
    rows = [json.loads(line) for line in (run / "predictions_test.jsonl").read_text().splitlines()]
    assert len(rows) == 24 and {"audio", "prediction", "reference"} == set(rows[0])


def test_the_pipeline_transcribes_as_the_run_did(run, folders):
    """Singly, in a batch with padding, in pieces, and with times."""
    said = [json.loads(line) for line in (run / "predictions_test.jsonl").read_text().splitlines()][:4]
    sounds = [read_sound(row["audio"], "it")[0] for row in said]
    given = [{"raw": sound, "sampling_rate": RATE} for sound in sounds]
    transcribe = pipeline("automatic-speech-recognition", model=str(run), device="cpu")
    assert transcribe.feature_extractor.sampling_rate == RATE
    assert [transcribe(dict(one))["text"] for one in given] == [row["prediction"] for row in said]
    together = transcribe([dict(one) for one in given], batch_size=4)
    assert [one["text"] for one in together] == [row["prediction"] for row in said]
    timed = transcribe(dict(given[0]), return_timestamps="char")
    ends = [chunk["timestamp"][1] for chunk in timed["chunks"]]
    assert ends == sorted(ends) and 0 < ends[-1] <= len(sounds[0]) / RATE + 0.04
    words = transcribe(dict(given[0]), return_timestamps="word")["chunks"]
    assert [word["text"] for word in words] == said[0]["prediction"].split(), words
    pieces = [transcribe(dict(one), chunk_length_s=1.0, stride_length_s=0.2)["text"] for one in given]
    assert pieces == [row["prediction"] for row in said]


def test_predict_and_evaluate_read_other_files(run, folders, tmp_path, capsys):
    target = tmp_path / "more"
    target.mkdir()
    write_wav(target / "one.wav", spell_in_tones("bad deed", RATE, 77), RATE)
    found = {}
    for beams in ("1", "6"):
        command = ["predict", "--model", str(run), "--data", str(target), "--use_cpu", "--no_progress"]
        assert main([*command, "--num_beams", beams]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        found[beams] = json.loads(lines[0])["prediction"]
    single = ["predict", "--model", str(run), "--data", str(target / "one.wav"), "--use_cpu", "--no_progress"]
    assert main([*single, "--num_beams", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prediction"] == found["1"]
    model, processor = AutoModelForCTC.from_pretrained(run), AutoProcessor.from_pretrained(run)
    inputs = processor(spell_in_tones("bad deed", RATE, 77), sampling_rate=RATE, return_tensors="pt")
    for beams, text in found.items():
        labels = model.transcribe(inputs["input_features"], inputs["attention_mask"], num_beams=int(beams))
        assert processor.tokenizer.decode(labels[0], group_tokens=False) == text
    (target / "one.txt").write_text("bad  deed\n")
    assert main(["evaluate", "--model", str(run), "--data", str(target), "--json", "--use_cpu"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert {"wer", "cer", "loss"} <= set(measured)


def test_training_goes_on_with_the_saved_vocabulary(run, folders, tmp_path):
    more = ["finetune", "--task", "speech-recognition", "--model", str(run), "--data", str(folders / "test")]
    more += ["--max_steps", "1", "--use_cpu", "true", "--report_to", "none", "--output_dir", str(tmp_path / "again")]
    assert main([*more, "--augment", "time_mask", "frequency_mask"]) == 0
    model = AutoModelForCTC.from_pretrained(tmp_path / "again")
    assert model.config.vocab_size == AutoModelForCTC.from_pretrained(run).config.vocab_size


def test_what_is_refused(run, folders, tmp_path, capsys):
    base = ["finetune", *OPTIONS, "--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--data"]
    place = tmp_path / "sounds"
    place.mkdir()
    samples = spell_in_tones("bad", RATE, 1)
    for name in ("a", "b", "c"):
        write_wav(place / f"{name}.wav", samples, RATE)
        (place / f"{name}.txt").write_text("bad")
    evaluate = ["evaluate", "--model", str(run), "--use_cpu", "--data", str(place)]

    write_wav(place / "b.wav", samples, 16000)
    said = refused(capsys, *base, str(place))
    assert "samples per second, and the model reads" in said and "-ar" in said
    write_wav(place / "b.wav", samples, RATE)

    (place / "c.txt").write_text("bäd")
    assert "has the character 'ä' in its transcript" in refused(capsys, *evaluate)
    (place / "c.txt").write_text("b|d")
    assert "stands for the space between words" in refused(capsys, *base, str(place))
    (place / "c.txt").write_text("bad " * 20)
    assert "have room for one character each" in refused(capsys, *base, str(place))
    (place / "c.txt").unlink()
    assert "has no transcript next to it" in refused(capsys, *base, str(place))
    (place / "c.txt").write_text("bad")

    with wave.open(str(place / "c.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(4000))
    assert "has 2 channels, and speech is read from one" in refused(capsys, *base, str(place))
    write_wav(place / "c.wav", samples[:100], RATE)
    assert "less than two frames" in refused(capsys, *base, str(place))
    (place / "c.wav").write_bytes(b"no sound at all")
    assert "c.wav" in refused(capsys, *base, str(place))
    table = tmp_path / "rows.jsonl"
    table.write_text(json.dumps({"audio": "nowhere.wav", "text": "bad"}) + "\n")
    assert "there is no such file" in refused(capsys, *base, str(table), "--validation_fraction", "0")
    assert "nothing to do to a sound" in refused(capsys, *base, str(place), "--augment", "flip")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width, tmp_path):
    """Whole numbers of 8 (without sign) to 32 bits, written by hand."""
    values = [0.0, 0.5, -0.5, -1.0]
    whole = [int(value * 2 ** (8 * width - 1)) for value in values]
    raw = b"".join(
        (number + 128).to_bytes(1, "little") if width == 1 else number.to_bytes(width, "little", signed=True)
        for number in whole
    )
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(raw)
    samples, rate = read_sound(str(tmp_path / "a.wav"), "it")
    assert rate == RATE and samples.tolist() == values
    assert read_sound((tmp_path / "a.wav").read_bytes(), "it")[0].tolist() == values


def test_paths_stand_beside_their_table(tmp_path):
    from datasets import Dataset

    for split in ("train", "test"):  # files of one name in each
        write_tone_speech(tmp_path / split, 3, seed=len(split))
    source = TaskData(data=[str(tmp_path / "train")], test_data=[str(tmp_path / "test")], validation_fraction=0.0)
    for split, rows in load_sounds(source).items():
        assert sorted(rows["audio"]) == [str(tmp_path / split / f"{number}.wav") for number in range(3)]
    where = RowNames(Dataset.from_dict({"audio": ["a.wav"]}), "train")
    assert find_sound(str(tmp_path / "test" / "1.wav"), where, 0) == str(tmp_path / "test" / "1.wav")
    assert find_sound({"bytes": b"x", "path": None}, where, 0) == b"x"
    with pytest.raises(ValueError, match="row 0 of the train split has no path of a sound but 3"):
        find_sound(3, where, 0)


def test_what_is_hidden_of_a_sound_depends_on_seed_epoch_and_sound():
    rows = [{"input_features": np.random.default_rng(n).normal(size=(60 + n, 20)).astype("f4")} for n in range(2)]
    collator = SoundCollator(None, ("time_mask", "frequency_mask"), seed=3)
    first = collator(rows)["input_features"]
    assert torch.equal(collator(rows[1:])["input_features"][0], first[1])
    assert torch.equal(SoundCollator(None, ("time_mask", "frequency_mask"), seed=3)(rows)["input_features"], first)
    plain = collator.as_static()(rows)["input_features"]
    hidden = 0
    for epoch in range(20):
        collator.set_epoch(epoch)
        changed = collator(rows)["input_features"] != plain
        assert (collator(rows)["input_features"][changed] == 0).all()
        hidden += changed.float().mean().item()
    assert 0.1 < hidden / 20 < 0.6
