"""What is asked of speech recognition: columns of `datasets`, ids and frames that must agree, references, files."""

import json
import struct
import wave
from dataclasses import replace

import datasets
import numpy as np
import pytest
from transformers import AutoConfig, AutoFeatureExtractor

from examples.sounds import spell_in_tones, write_wav
from hf_xformers.cli import main
from hf_xformers.finetuning import TaskData
from hf_xformers.finetuning.options import TaskOptions
from hf_xformers.finetuning.peft_methods import check_method
from hf_xformers.finetuning.sound_rows import read_sound
from hf_xformers.finetuning.sources import hold_out_rows
from hf_xformers.finetuning.tasks import build_task
from tests.refused import refused

RATE = 8000
WORDS = ("ab", "cab", "dad", "ebb", "bed", "ace")
STEP = "--max_steps 1 --use_cpu true --report_to none --eval_strategy no --save_strategy no --load_best_model_at_end"
STEP = [*STEP.split(), "false", "--logging_steps", "1"]
NEW = (
    "--task speech-recognition --variant conformer --num_mel_bins 24 --hidden_size 16 --num_hidden_layers 1"
    " --num_attention_heads 2 --intermediate_size 16 --block.conv_kernel 3 --embedding.channels 4"
).split()


def write_sounds(folder, words=WORDS):
    folder.mkdir(parents=True, exist_ok=True)
    for number, word in enumerate(words):
        write_wav(folder / f"{number}.wav", spell_in_tones(word, RATE, number), RATE)
        (folder / f"{number}.txt").write_text(word)
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    return write_sounds(tmp_path_factory.mktemp("sounds"))


@pytest.fixture(scope="module")
def run(sounds, tmp_path_factory):
    """A model after one step."""
    target = tmp_path_factory.mktemp("run") / "model"
    assert main(["finetune", *NEW, *STEP, "--data", str(sounds), "--output_dir", str(target)]) == 0
    return target


def as_dataset(folder):
    """An `Audio` column as the Hub has it, of the bytes of files."""
    files = sorted(folder.glob("*.wav"))
    rows = [
        {"audio": {"bytes": file.read_bytes(), "path": file.name}, "text": file.with_suffix(".txt").read_text()}
        for file in files
    ]
    return datasets.Dataset.from_list(rows).cast_column("audio", datasets.Audio(sampling_rate=RATE))


def request(*sources, **options):
    """The task with its splits, settled for a new vocabulary."""
    task = build_task(TaskOptions("speech-recognition", **options))
    splits = task.load(*sources)
    task.settle(splits, None)
    return task, splits


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_audio_columns_are_read_and_held_out(form, sounds, run, tmp_path, capsys):
    rows, place = as_dataset(sounds), tmp_path / f"rows.{form}"
    rows.save_to_disk(place) if form == "folder" else rows.to_parquet(place)
    task, splits = request(TaskData(data=[str(place)], validation_fraction=0.3))
    assert sum(map(len, splits.values())) == len(WORDS) and len(splits) == 2
    assert splits["train"][0]["audio"]["bytes"][:4] == b"RIFF"
    assert task.rate == RATE
    assert main(["predict", "--model", str(run), "--data", str(place), "--use_cpu", "--no_progress"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["reference"] for line in lines] == list(WORDS)


def test_equal_sounds_are_on_one_side(sounds):
    """Whatever their files are called; and pictures, whose decoded objects say where they are in memory."""
    content = [file.read_bytes() for file in sorted(sounds.glob("*.wav"))] * 4
    for kind in (datasets.Audio, datasets.Image):
        rows = [{"it": {"bytes": value, "path": f"{number}.wav"}} for number, value in enumerate(content)]
        columns = datasets.Dataset.from_list(rows).cast_column("it", kind())
        train, held = (part.cast_column("it", kind(decode=False)) for part in hold_out_rows(columns, 0.4))
        sides = [{row["it"]["bytes"] for row in part} for part in (train, held)]
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == len(WORDS)


@pytest.mark.parametrize("option, value", [("pad_token_id", 4), ("vocab_size", 3), ("vocab_size", 40)])
def test_ids_follow_from_the_characters(option, value, sounds, tmp_path, capsys):
    target = tmp_path / "run"
    command = ["finetune", *NEW, *STEP, "--data", sounds, "--output_dir", target, f"--{option}", value]
    assert f"leave --{option} out" in refused(capsys, *command) and not target.exists()


@pytest.mark.parametrize("option, value", [("pad_token_id", 4), ("hop_length", 160)])
def test_a_saved_model_keeps_its_blank_and_frames(option, value, run, sounds, tmp_path, capsys):
    command = ["finetune", "--task", "speech-recognition", "--model", run, *STEP, "--data", sounds]
    said = refused(capsys, *command, "--output_dir", tmp_path / "run", f"--{option}", value)
    assert f"`{option}` {value} is not the" in said and f"leave --{option} out" in said


def test_frames_are_as_far_apart_as_the_configuration_says(sounds, tmp_path):
    target = tmp_path / "run"
    command = ["finetune", *NEW, *STEP, "--data", str(sounds), "--output_dir", str(target), "--hop_length", "160"]
    assert main(command) == 0
    extractor, config = AutoFeatureExtractor.from_pretrained(target), AutoConfig.from_pretrained(target)
    assert extractor.hop_length == config.hop_length == 160
    made = extractor(np.zeros(RATE, "f4"), sampling_rate=RATE, return_tensors="pt")
    assert made["attention_mask"].sum() == RATE // 160


def test_characters_of_rows_that_were_held_out(tmp_path):
    """Each row has a letter of its own, so that whatever is held out has one that the rest has not."""
    words = [letter * 3 for letter in "abcdef"]
    source = TaskData(data=[str(write_sounds(tmp_path / "sounds", words))], validation_fraction=0.3)
    task, splits = request(source)
    assert len(splits["validation"]) and task.characters == list("abcdef")
    more = write_sounds(tmp_path / "more", ["fig"])
    task, splits = request(replace(source, validation_data=[str(more)]))  # the user's own: it must fit
    assert len(splits["train"]) == len(words) and task.characters == list("abcdef")
    with pytest.raises(ValueError, match="validation_fraction=2"):
        request(replace(source, validation_fraction=2))


@pytest.mark.parametrize("broken", ["missing", "latin", "unknown", "long", "bar"])
def test_predictions_need_no_references(broken, run, sounds, tmp_path, capsys):
    place = write_sounds(tmp_path / "sounds", WORDS[:2])
    text = place / "1.txt"
    contents = {"latin": b"b\xe4d", "unknown": "bäd".encode(), "long": b"bad " * 40, "bar": b"a|b"}
    text.unlink() if broken == "missing" else text.write_bytes(contents[broken])
    command = ["--model", run, "--data", place, "--use_cpu", "--no_progress"]
    assert main(["predict", *map(str, command)]) == 0
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [set(row) for row in rows] == [{"audio", "prediction"}] * 2
    said = refused(capsys, "evaluate", *command)
    assert "1.txt" in said or "1.wav" in said
    if broken == "latin":
        assert "UTF-8" in said and "1.txt" in said


EXTENSIBLE = bytes.fromhex("000000001000800000aa00389b71")


def extensible(raw, width, tag, odd=False):
    """A WAV file as tools write it for 24 bits: the header says `extensible`, its sub-format the samples."""
    parts = struct.pack("<HHIIHH", 0xFFFE, 1, RATE, RATE * width, width, 8 * width)
    parts += struct.pack("<HHIH", 22, 8 * width, 4, tag) + EXTENSIBLE
    chunks = b"junk\x03\x00\x00\x00abc\x00" if odd else b""
    chunks += b"fmt " + struct.pack("<I", len(parts)) + parts + b"data" + struct.pack("<I", len(raw)) + raw
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("width", [2, 3])
def test_extensible_headers(width, odd, tmp_path):
    values = [0.0, 0.5, -0.5, -1.0]
    raw = b"".join(int(v * 2 ** (8 * width - 1)).to_bytes(width, "little", signed=True) for v in values)
    (tmp_path / "a.wav").write_bytes(extensible(raw, width, 1, odd))
    samples, rate = read_sound(str(tmp_path / "a.wav"), "it")
    assert rate == RATE and samples.tolist() == values


def test_other_samples_are_no_pcm(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    for content in (extensible(bytes(16), 4, 3), extensible(bytes(16), 4, 1)[:30], extensible(bytes(16), 8, 1)):
        with pytest.raises(ValueError, match="is no WAV file of PCM samples"):
            read_sound(content, "it")


@pytest.mark.parametrize("method, words", [("ia3", None), ("lora", ("fog", "hop", "gong", "pool"))])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_few_parameters(method, words, run, sounds, tmp_path, capsys):
    """With another alphabet the adapter brings a head of its own, which its base has to make room for."""
    data, target = str(write_sounds(tmp_path / "others", words) if words else sounds), str(tmp_path / "adapter")
    command = ["finetune", "--task", "speech-recognition", "--model", str(run), *STEP, "--data", data, "--test_data"]
    command += [data, "--learning_rate", "0.1", "--warmup_steps", "0", *(["--new_head", "true"] if words else [])]
    assert main([*command, "--peft", method, "--output_dir", target]) == 0
    summary = json.loads((tmp_path / "adapter" / "training_summary.json").read_text())
    assert 0 < summary["trained_parameters"] < summary["parameters"] / 2
    losses = []
    for model in (target,) if words else (target, str(run)):
        command = ["evaluate", "--model", model, "--data", data, "--use_cpu", "--no_progress", "--json"]
        capsys.readouterr()
        assert main(command) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(summary["test_loss"], abs=1e-5) and losses[0] not in losses[1:]


def test_methods_that_do_not_work():
    with pytest.raises(ValueError, match="--peft houlsby does not work with a ForCTC class; choose one of lora, ia3$"):
        check_method("houlsby", "CTC")
    with pytest.raises(ValueError, match="no method does, so leave --peft out"):
        check_method("lora", "TimeSeriesPrediction")


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--max_length", "3"], "--max_length 3 counts tokens of texts"),
        (["--sampling_rate", "50"], "--sampling_rate 50 must be at least 100"),
        (["--ctc_beams", "0"], "--ctc_beams 0 must be at least 1"),
    ],
)
def test_options(extra, message, sounds, tmp_path, capsys):
    assert message in refused(capsys, "finetune", *NEW, "--data", sounds, "--output_dir", tmp_path / "run", *extra)


def test_a_sound_of_a_low_rate(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(90)
        file.writeframes(bytes(4000))
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(ValueError, match="has 90 samples per second, which must be at least 100"):
        request(TaskData(data=[str(tmp_path)], validation_fraction=0.0))


def test_what_other_commands_say_of_sounds(run, sounds, tmp_path, capsys):
    predict = ["predict", "--model", run, "--use_cpu", "--no_progress"]
    assert "reads none; give its rows with --data" in refused(capsys, *predict, "--text", "hello")
    said = refused(capsys, "features", "--model", run, "--data", sounds, "--output", tmp_path / "features")
    assert "reads sounds, and features are of texts or images" in said and "input_features" not in said
