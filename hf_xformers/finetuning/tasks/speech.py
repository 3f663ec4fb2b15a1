# SPDX-License-Identifier: Apache-2.0
"""Speech recognition: a transcript of each sound."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...embedding.frames import SUBSAMPLING, halved
from ...objectives.base import SeededCollator, keyed_generator, pad_rows
from ..names import SOUNDS, TRANSCRIPTS
from ..origin import RowNames
from ..sound_rows import SOUND_SUFFIXES
from .base import Encoded, Task, Trivial, check_columns, text_of, true_answers

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from ..options import TaskData, TaskOptions

SOUND_AUGMENTATIONS = ("time_mask", "frequency_mask")
BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
FRAMES_PER_SECOND, FRAME_SECONDS = 100, 0.025
_CANDIDATES = 40  # transcripts that are tried as the baseline


class SpeechRecognition(Task):
    """The characters of what is said. Metrics: word error rate, character error rate.

    A new model has the characters of the training transcripts, and of those that are held out of them; it reads sounds
    of the rate of the first training sound (`sampling_rate` says another one). A trained model's are its own.

    needs_transcripts: whether rows without transcripts that fit are refused; else they are read without them.
    """

    id = "speech-recognition"
    head = "CTC"
    metric = "wer"
    metric_names = ("wer", "cer")
    reads = ("audio_column", "text_column", "augment", "sampling_rate", "ctc_beams")
    reads_text = False
    row_files = SOUND_SUFFIXES
    needs_transcripts = True
    audio_column: str
    text_column: str

    def __init__(self, options: TaskOptions) -> None:
        super().__init__(options)
        for name in options.augment:
            if name not in SOUND_AUGMENTATIONS:
                raise ValueError(
                    f"--augment {name!r} is nothing to do to a sound; take some of {', '.join(SOUND_AUGMENTATIONS)}"
                )
        if options.ctc_beams < 1:
            raise ValueError(f"--ctc_beams {options.ctc_beams} must be at least 1")
        if options.sampling_rate is not None:
            _check_rate(options.sampling_rate, f"--sampling_rate {options.sampling_rate}")
        self.characters: list[str] | None = None  # of a new vocabulary
        self.divided = False  # whether the validation rows are some of those given for training
        self.rate: int | None = options.sampling_rate
        self.words: Any = None  # the processor, once rows are encoded
        self.blank = 0

    def extent(self) -> str:
        return "of a sound" if self.rate is None else f"of a sound of {self.rate} samples per second"

    # ------------------------------------------------------------------------------------------------ data

    def columns_of_text(self) -> list[str]:
        return [*super().columns_of_text(), *TRANSCRIPTS]

    def load(self, source: TaskData) -> dict[str, Dataset]:
        from ..sound_rows import load_sounds
        from ..sources import divided

        splits = load_sounds(source, transcripts=self.needs_transcripts, texts=self.columns_of_text())
        self.divided = "validation" not in splits
        return divided(splits, source)

    def of_files(self, paths: Sequence[str]) -> Dataset:
        from datasets import Dataset

        return Dataset.from_dict({self.options.audio_column or SOUNDS[0]: list(paths)})

    def settle(self, splits: Mapping[str, Dataset], config: PreTrainedConfig | None) -> None:
        from ..sound_rows import find_sound, read_sound

        if self.options.max_length is not None:
            raise ValueError(
                f"--max_length {self.options.max_length} counts tokens of texts, and sounds are read whole; leave it"
                " out, and divide sounds that are too long"
            )
        train = splits["train"]
        self.find_columns(train)
        check_columns(splits, [self.audio_column, self.text_column], optional_in_test=[self.text_column])
        if config is not None:  # its processor says the rest
            return
        # Rows that were held out by chance must not stop the run by a character that only they have.
        given = [name for name in splits if name == "train" or (name == "validation" and self.divided)]
        texts = [text for name in given for text in self._transcripts(splits[name], RowNames(splits[name], name))]
        self.characters = sorted(set("".join(texts)) - {" "})
        if not self.characters:
            raise ValueError("the training transcripts are all empty; give what is said in the sounds")
        if self.rate is None:
            where = RowNames(train, "train")
            self.rate = read_sound(find_sound(train[self.audio_column][0], where, 0), where[0])[1]
            _check_rate(self.rate, f"{where[0]} has {self.rate} samples per second, which")

    def find_columns(self, rows: Dataset, answers: bool = True) -> None:
        self.audio_column = self.column(rows, self.options.audio_column, SOUNDS, "sound", "audio_column")
        wanted = self.options.text_column
        self.text_column = self.column(rows, wanted, TRANSCRIPTS, "transcript", "text_column", answers)

    def columns(self) -> dict[str, Any]:
        return {"audio_column": self.audio_column, "text_column": self.text_column}

    def config_fields(self) -> dict[str, Any]:
        if self.characters is None:
            return {}
        hop = (self.rate or 16000) // FRAMES_PER_SECOND
        return {"vocab_size": len(self.characters) + 3, "pad_token_id": 0, "hop_length": hop}

    def _transcripts(self, rows: Dataset, where: RowNames) -> list[str]:
        """The transcripts with single spaces. Raises ValueError for what is no text."""
        found = []
        for row, text in enumerate(map(text_of, rows[self.text_column])):
            if not isinstance(text, str):
                raise ValueError(f"{where[row]} has {text!r} in column {self.text_column!r}, which is no transcript")
            if SPACE in text:
                raise ValueError(
                    f"{where[row]} has {SPACE!r} in its transcript, which stands for the space between words; leave it"
                    " out"
                )
            found.append(" ".join(text.split()))
        return found

    def processor(self, config: PreTrainedConfig, saved: str | None) -> Any:
        """The saved model's feature extractor and tokenizer; for a new vocabulary log mel energies, and its
        characters.

        Raises ValueError where they and the configuration disagree: labels would be read as the wrong characters, or
        times would be wrong.
        """
        from transformers import AutoFeatureExtractor, AutoTokenizer, Wav2Vec2Processor

        if self.characters is None and saved is not None:
            try:
                extractor = AutoFeatureExtractor.from_pretrained(saved)
                tokenizer = AutoTokenizer.from_pretrained(saved)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"the model {saved!r} comes without a feature extractor and a tokenizer that load, so nobody knows"
                    " what its sounds and labels are; save both with it, or train a new head with --new_head"
                ) from error
            if self.options.sampling_rate not in (None, extractor.sampling_rate):
                raise ValueError(
                    f"--sampling_rate {self.options.sampling_rate} is not the {extractor.sampling_rate} of the model;"
                    " leave it out"
                )
        else:
            extractor, tokenizer = self._extractor(config), self._tokenizer()
            if config.vocab_size != len(tokenizer):
                raise ValueError(
                    f"`vocab_size` {config.vocab_size} is not the {len(tokenizer)} that follows from the characters of"
                    " the transcripts; leave --vocab_size out"
                )
        for name, value, owner in (
            ("pad_token_id", tokenizer.pad_token_id, "tokenizer, whose padding token is the blank of CTC"),
            ("hop_length", getattr(extractor, "hop_length", None), "feature extractor"),
        ):
            if getattr(config, name) != value:
                raise ValueError(
                    f"`{name}` {getattr(config, name)} is not the {value} of the {owner}; leave --{name} out, or"
                    " correct it in the model's config.json"
                )
        return Wav2Vec2Processor(extractor, tokenizer)

    def _extractor(self, config: Any) -> Any:
        from transformers import ParakeetFeatureExtractor

        rate = self.rate or 16000
        window = max(2, round(rate * FRAME_SECONDS))
        return ParakeetFeatureExtractor(
            feature_size=config.num_mel_bins,
            sampling_rate=rate,
            hop_length=config.hop_length,
            win_length=window,
            n_fft=1 << (window - 1).bit_length(),
        )

    def _tokenizer(self) -> Any:
        from transformers import Wav2Vec2CTCTokenizer

        names = [BLANK, UNKNOWN, SPACE, *(self.characters or [])]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "vocab.json"
            file.write_text(json.dumps({name: number for number, name in enumerate(names)}), encoding="utf-8")
            return Wav2Vec2CTCTokenizer(
                str(file),
                bos_token=None,
                eos_token=None,
                unk_token=UNKNOWN,
                pad_token=BLANK,
                word_delimiter_token=SPACE,
            )

    def encode(self, rows: Dataset, tokenizer: Any, split: str) -> Encoded:
        from datasets import Dataset

        from ..sound_rows import find_sound, say_left_out

        self.words, self.blank = tokenizer, tokenizer.tokenizer.pad_token_id
        extractor = tokenizer.feature_extractor
        where = RowNames(rows, split)
        sounds = [find_sound(stored, where, row) for row, stored in enumerate(rows[self.audio_column])]
        states = [self._states(sound, extractor, where[row]) for row, sound in enumerate(sounds)]
        kept: list[dict[str, Any]] = [
            {"audio": sound if isinstance(sound, str) else str(row)} for row, sound in enumerate(sounds)
        ]
        columns: dict[str, Any] = {"sound": sounds}
        labelled = bool(true_answers(rows, self.text_column, split))
        if labelled:
            try:
                texts, columns["labels"] = self._references(rows, states, tokenizer.tokenizer, where)
                kept = [{**row, "text": text} for row, text in zip(kept, texts)]
            except ValueError as error:
                if self.needs_transcripts:
                    raise
                say_left_out(error)
                labelled = False
        features = Dataset.from_dict(columns).with_transform(ReadSounds(extractor))
        return Encoded(features, kept, labelled)

    def _references(
        self, rows: Dataset, states: Sequence[int], tokenizer: Any, where: RowNames
    ) -> tuple[list[str], list[list[int]]]:
        """(transcripts, their labels). states: that the model makes of each sound. Raises ValueError for what is no
        transcript of the vocabulary, or is too long for its sound."""
        texts = self._transcripts(rows, where)
        labels = [self._labels(text, tokenizer, where[row]) for row, text in enumerate(texts)]
        for row, (ids, count) in enumerate(zip(labels, states)):
            self._check_fit(ids, count, where[row])
        return texts, labels

    @staticmethod
    def _states(sound: str | bytes, extractor: Any, name: str) -> int:
        """States that the model makes of a sound. Raises ValueError for one that cannot be read, of another rate, or
        too short."""
        from ..sound_rows import read_sound

        samples, rate = read_sound(sound, name)
        if rate != extractor.sampling_rate:
            raise ValueError(
                f"{name} has {rate} samples per second, and the model reads {extractor.sampling_rate}; resample it,"
                f" e.g. with `ffmpeg -i IN.wav -ar {extractor.sampling_rate} OUT.wav`"
            )
        frames = len(samples) // extractor.hop_length
        if frames < 2:
            raise ValueError(
                f"{name} has {len(samples)} samples, less than two frames of {extractor.hop_length}; remove the row"
            )
        return halved(halved(frames))

    @staticmethod
    def _labels(text: str, tokenizer: Any, name: str) -> list[int]:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokenizer.unk_token_id in ids:
            unknown = [
                character
                for character in dict.fromkeys(text)
                if tokenizer.unk_token_id in tokenizer(character, add_special_tokens=False)["input_ids"]
            ]
            raise ValueError(
                f"{name} has the character {(unknown or [text])[0]!r} in its transcript, which the model's vocabulary"
                " has not (it has those of the training transcripts); write it in others, or add training rows with it"
                " and start anew"
            )
        return ids

    @staticmethod
    def _check_fit(labels: Sequence[int], states: int, name: str) -> None:
        repeats = sum(one == other for one, other in itertools.pairwise(labels))
        if len(labels) + repeats > states:
            raise ValueError(
                f"{name} has a transcript of {len(labels)} characters, {repeats} of them doubled, and its sound is"
                f" {states} states of {SUBSAMPLING} frames long, which have room for one character each; correct the"
                " transcript, or remove the row"
            )

    def collator(self, tokenizer: Any, model: Any, seed: int) -> SoundCollator:
        self.blank = model.config.pad_token_id
        return SoundCollator(tokenizer.feature_extractor, self.options.augment, seed)

    # ------------------------------------------------------------------------------------------------ after the model

    def reduce(self, outputs: Any, inputs: Mapping[str, Any], next_token: bool) -> tuple[Tensor, ...]:
        """The labels of each row [B, T], -100 where there is none."""
        from ...ops.ctc_decoding import best_path, prefix_beam_search

        logits, mask = outputs["logits"], outputs.get("frame_mask")
        if self.options.ctc_beams == 1:
            found = best_path(logits, mask, self.blank)
        else:
            log_probs = torch.nn.functional.log_softmax(logits.double(), dim=-1).cpu()
            counts = [logits.shape[1]] * len(logits) if mask is None else mask.sum(-1).tolist()
            found = [
                prefix_beam_search(row[:count], self.options.ctc_beams, self.blank)[0][0]
                for row, count in zip(log_probs, counts)
            ]
        rows = [torch.tensor(labels, dtype=torch.long) for labels in found]
        return (pad_rows(rows, -100, logits.shape[1], "right").to(logits.device),)

    def predictions(self, kept: Sequence[np.ndarray], encoded: Encoded) -> list[dict[str, Any]]:
        tokenizer = self.words.tokenizer
        rows = []
        for ids, row in zip(kept[0], encoded.rows):
            text = tokenizer.decode([int(number) for number in ids if number >= 0], group_tokens=False)
            true = {"reference": row["text"]} if encoded.labelled else {}
            rows.append({"audio": row["audio"], "prediction": " ".join(text.split()), **true})
        return rows

    def score(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        said, true = [row["prediction"] for row in rows], [row["reference"] for row in rows]
        return {**self.metric_of("wer", said, true), **self.metric_of("cer", said, true)}

    def trivial(self, train: Encoded) -> Trivial | None:
        """One transcript for all sounds, the best that was found: of the most frequent ones, and of the most frequent
        word over and over."""
        texts = [row["text"] for row in train.rows if row.get("text")]
        if not texts:
            return None
        word = Counter(word for text in texts for word in text.split()).most_common(1)[0][0]
        longest = max(len(text.split()) for text in texts)
        frequent = [text for text, _ in Counter(texts).most_common(_CANDIDATES)]
        repeated = [" ".join([word] * count) for count in range(min(longest, _CANDIDATES) + 1)]
        some = texts[:200]
        best = min([*repeated, *frequent], key=lambda said: self.metric_of("wer", [said] * len(some), some)["wer"])
        return Trivial(f"{best!r} of every sound", best)


def _check_rate(rate: int, said: str) -> None:
    """Refuses a rate at which a frame would be shorter than a sample."""
    if rate < FRAMES_PER_SECOND:
        raise ValueError(
            f"{said} must be at least {FRAMES_PER_SECOND}: there are so many frames in a second; take sounds of a"
            " higher rate"
        )


class ReadSounds:
    """Columns `sound` (files or their bytes) as `input_features` [T, F]."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        from ..sound_rows import read_sound

        found = {name: values for name, values in batch.items() if name != "sound"}
        if "sound" in batch:
            found["input_features"] = [self.features(read_sound(sound, "a sound")[0]) for sound in batch["sound"]]
        return found

    def features(self, samples: np.ndarray) -> Tensor:
        """[N] -> [T, F]"""
        made = self.extractor(samples, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        features = made["input_features"][0]
        return features[made["attention_mask"][0] != 0] if "attention_mask" in made else features


class SoundCollator(SeededCollator):
    """Batches of `input_features` [B, T, F] with `attention_mask` [B, T], and `labels` [B, U], -100 as padding.

    augmentations, in training only (Park et al. 2019, SpecAugment, arXiv 1904.08779, with the settings of Gulati et
    al. 2020, section 3.1, by shares of the sound): `time_mask` makes ten stretches of up to a twentieth of the frames
    zero, `frequency_mask` one of up to a third of the features (27 of 80). What happens to a sound depends on the
    seed, the epoch and its frames alone.
    """

    def __init__(self, extractor: Any, augmentations: Sequence[str] = (), seed: int = 0, static: bool = False) -> None:
        super().__init__(seed, static)
        self.extractor, self.augmentations = extractor, tuple(augmentations)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        sounds = [torch.as_tensor(feature["input_features"]) for feature in features]
        if self.augmentations and not self.static:
            sounds = [self.augmented(sound) for sound in sounds]
        longest = max(len(sound) for sound in sounds)
        batch = torch.zeros(len(sounds), longest, sounds[0].shape[1])
        mask = torch.zeros(len(sounds), longest, dtype=torch.long)
        for row, sound in enumerate(sounds):
            batch[row, : len(sound)], mask[row, : len(sound)] = sound, 1
        found = {"input_features": batch, "attention_mask": mask}
        labels = [torch.as_tensor(feature["labels"], dtype=torch.long) for feature in features if "labels" in feature]
        if labels:
            found["labels"] = pad_rows(labels, -100, max(1, *map(len, labels)), "right")
        return found

    def augmented(self, sound: Tensor) -> Tensor:
        """[T, F] -> [T, F]; features have mean 0, so zero is what says nothing."""
        generator = keyed_generator(self.seed, self.epoch, (sound[:, :4] * 1000).long().flatten())
        sound = sound.clone()

        def stretch(size: int, most: int) -> slice:
            length = int(torch.randint(0, most + 1, (), generator=generator))
            start = int(torch.randint(0, size - length + 1, (), generator=generator))
            return slice(start, start + length)

        frames, width = sound.shape
        if "time_mask" in self.augmentations:
            for _ in range(10):
                sound[stretch(frames, frames // 20)] = 0.0
        if "frequency_mask" in self.augmentations:
            sound[:, stretch(width, width * 27 // 80)] = 0.0
        return sound
