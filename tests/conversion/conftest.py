"""Tiny random models of every convertible class, and inputs for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from tests.conversion.architectures import FIRST, LENGTH, LENGTHS, SMALL, SPECIAL, VOCAB

BERT = ("BertConfig", SMALL)
ROBERTA = ("RobertaConfig", {**SMALL, "type_vocab_size": 1, "layer_norm_eps": 1e-5})
GPT_SIZES = dict(**SPECIAL, vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=24)
GPT2 = ("GPT2Config", {**GPT_SIZES, "n_inner": 48})
GPT = ("OpenAIGPTConfig", GPT_SIZES)
BART = (
    "BartConfig",
    dict(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        max_position_embeddings=24,
    ),
)
ROFORMER = ("RoFormerConfig", {**SMALL, "layer_norm_eps": 1e-5})
DEBERTA_SIZES = dict(
    **SMALL, relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"], cls_dropout=0.2
)
# as the published second and third versions have it, smaller
DEBERTA = (
    "DebertaV2Config",
    {**DEBERTA_SIZES, "position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
)
DEBERTA_OWN = (
    "DebertaV2Config",
    {**DEBERTA_SIZES, "position_buckets": -1, "share_att_key": False, "norm_rel_ebd": "none", "type_vocab_size": 2},
)
CONVOLUTION = {"conv_kernel_size": 3, "conv_groups": 2, "conv_act": "gelu"}  # v2-xlarge and v2-xxlarge
T5_SIZES = dict(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=6,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=1,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
    decoder_start_token_id=0,
)
T5 = ("T5Config", T5_SIZES)
T5_V1_1 = ("T5Config", {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})


@dataclass(frozen=True)
class Case:
    """theirs: transformers' class; ours: the class it converts to; complete: its head converts too."""

    theirs: str
    ours: str
    base: tuple[str, dict[str, Any]] = field(repr=False)
    changes: dict[str, Any] = field(default_factory=dict)
    complete: bool = True

    def __str__(self) -> str:
        return "-".join([self.theirs, *(f"{key}={value}" for key, value in self.changes.items())])

    def config(self, **changes: Any) -> transformers.PreTrainedConfig:
        name, fields = self.base
        return getattr(transformers, name)(**{**copy.deepcopy(fields), **self.changes, **changes})

    def make(self, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
        """A model whose every tensor is random: fresh biases and norms are 0 and 1, and would hide a wrong mapping."""
        config = self.config(**changes)
        torch.manual_seed(seed)
        model = getattr(transformers, self.theirs)(config)
        untied = self.base is T5_V1_1 and hasattr(model, "lm_head")
        if untied:  # a checkpoint of v1.1 brings its own projection; a fresh model has none
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
        with torch.no_grad():
            frozen = {
                id(t) for t in model.parameters() if not t.requires_grad
            }  # computed: RoFormer's sines and cosines
            idle = {id(t) for name, t in model.named_parameters() if "pos_key_proj.bias" in name}  # changes no output
            for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
                if id(tensor) not in frozen | idle and tensor.is_floating_point() and tensor.ndim < 4:
                    tensor.add_(0.2 * torch.randn_like(tensor))
        return model.eval()

    # ---------------------------------------------------------------------------------------------- inputs

    @property
    def two_towers(self) -> bool:
        return self.base[0] in ("BartConfig", "T5Config") and not any(
            name in self.theirs for name in ("Encoder", "Token", "CausalLM")
        )

    @property
    def causal(self) -> bool:
        return self.base in (GPT, GPT2)

    @property
    def reads_first_token(self) -> bool:
        """Whether the head reads the first token, which is padding in a left-padded row."""
        pooled = ("SequenceClassification", "MultipleChoice", "NextSentence", "PreTraining")
        return self.base in (BERT, ROBERTA, ROFORMER, DEBERTA, DEBERTA_OWN) and any(
            name in self.theirs for name in pooled
        )

    def pads_left(self) -> bool:
        """Whether the source numbers left-padded rows rightly, by itself or by given position ids."""
        return self.base is not BART and "rotary_value" not in self.changes

    def pads_right(self) -> bool:
        """Whether the head reads real tokens alone then: RoFormer's reads the last place for multiple choice."""
        return self.theirs != "RoFormerForMultipleChoice"

    def labelled(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`given` with labels. The loss of a question-answering head also reads the logits of padding, which mean
        nothing and differ: its rows are whole."""
        if "QuestionAnswering" in self.theirs or not self.pads_right():
            given = self.inputs(lengths=(LENGTH,) * len(LENGTHS))
        return {**given, **self.labels(given)}

    def inputs(self, left: bool = False, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
        """Rows of 9, 6 and 1 tokens, padded on one side."""
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(FIRST, VOCAB, (len(LENGTHS), LENGTH), generator=generator)
        order = torch.arange(LENGTH)
        mask = torch.stack([order >= LENGTH - n if left else order < n for n in lengths])
        ids = ids.masked_fill(~mask, self.config().pad_token_id)
        given = {"input_ids": ids, "attention_mask": mask.long()}
        if left and (self.causal or self.base is BERT):
            given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if self.base in (BERT, ROFORMER, DEBERTA_OWN):
            given["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
        if "MultipleChoice" in self.theirs:
            given = {name: torch.stack([tensor, tensor.flip(0)], dim=1) for name, tensor in given.items()}
        if self.two_towers and ("SequenceClassification" in self.theirs or "QuestionAnswering" in self.theirs):
            if left:  # by default both read the input shifted, but ours knows which of it is padding
                start = ids.new_full((len(LENGTHS), 1), self.config().decoder_start_token_id)
                given["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], dim=1)
        elif self.two_towers:
            decoder = torch.randint(FIRST, VOCAB, (len(LENGTHS), 5), generator=generator)
            given["decoder_input_ids"] = decoder
            given["decoder_attention_mask"] = (torch.arange(5) < torch.tensor([[5], [3], [1]])).long()
        return given

    def labels(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(8)
        ids, mask = given["input_ids"], given["attention_mask"].bool()

        def draw(high: int, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator)

        rows = (len(LENGTHS),)
        name = self.theirs
        if "QuestionAnswering" in name:
            return {"start_positions": draw(LENGTH, rows), "end_positions": draw(LENGTH, rows)}
        if "MultipleChoice" in name:
            return {"labels": draw(2, rows)}
        if "SequenceClassification" in name:
            return {"labels": draw(self.config().num_labels, rows)}
        if "NextSentence" in name:
            return {"labels": draw(2, rows)}
        if "TokenClassification" in name:
            return {"labels": draw(2, tuple(ids.shape)).masked_fill(~mask, -100)}
        if "ConditionalGeneration" in name:
            seen = given["decoder_attention_mask"].bool()
            return {"labels": draw(VOCAB, tuple(seen.shape)).masked_fill(~seen, -100)}
        if "PreTraining" in name:
            labels = draw(VOCAB, tuple(ids.shape)).masked_fill(~mask, -100)
            return {"labels": labels, "next_sentence_label": draw(2, rows)}
        if "LM" in name:
            before = mask.roll(1, dims=-1)  # a first token after padding is predicted from padding: no target
            return {"labels": draw(VOCAB, tuple(ids.shape)).masked_fill(~mask | ~before, -100)}
        return {}


CASES = [
    Case("BertModel", "XFBertModel", BERT),
    Case("BertForPreTraining", "XFBertForPreTraining", BERT),
    Case("BertForMaskedLM", "XFBertForMaskedLM", BERT),
    Case("BertForMaskedLM", "XFBertForMaskedLM", BERT, {"hidden_act": "gelu_new", "tie_word_embeddings": False}),
    Case("BertLMHeadModel", "XFBertForCausalLM", BERT, {"is_decoder": True}),
    Case("BertForNextSentencePrediction", "XFBertForNextSentencePrediction", BERT),
    Case("BertForSequenceClassification", "XFBertForSequenceClassification", BERT, {"num_labels": 3}),
    Case("BertForTokenClassification", "XFBertForTokenClassification", BERT),
    Case("BertForQuestionAnswering", "XFBertForQuestionAnswering", BERT),
    Case("BertForMultipleChoice", "XFBertForMultipleChoice", BERT),
    Case("RobertaModel", "XFRobertaModel", ROBERTA),
    Case("RobertaForMaskedLM", "XFRobertaForMaskedLM", ROBERTA),
    Case("RobertaForMaskedLM", "XFRobertaForMaskedLM", ROBERTA, {"hidden_act": "relu", "pad_token_id": 3}),
    Case("RobertaForCausalLM", "XFRobertaForCausalLM", ROBERTA, {"is_decoder": True}),
    Case("RobertaForSequenceClassification", "XFRobertaForSequenceClassification", ROBERTA, {"num_labels": 3}),
    Case("RobertaForTokenClassification", "XFRobertaForTokenClassification", ROBERTA),
    Case("RobertaForQuestionAnswering", "XFRobertaForQuestionAnswering", ROBERTA),
    Case("RobertaForMultipleChoice", "XFRobertaForMultipleChoice", ROBERTA),
    Case("RoFormerModel", "XFRoformerModel", ROFORMER),
    Case("RoFormerModel", "XFRoformerModel", ROFORMER, {"rotary_value": True, "hidden_act": "relu"}),
    Case("RoFormerForMaskedLM", "XFRoformerForMaskedLM", ROFORMER),
    Case("RoFormerForMaskedLM", "XFRoformerForMaskedLM", ROFORMER, {"embedding_size": 12}),
    Case("RoFormerForCausalLM", "XFRoformerForCausalLM", ROFORMER, {"is_decoder": True}),
    Case("RoFormerForCausalLM", "XFRoformerForCausalLM", ROFORMER, {"is_decoder": True, "rotary_value": True}),
    Case("RoFormerForSequenceClassification", "XFRoformerForSequenceClassification", ROFORMER, {"num_labels": 3}),
    Case("RoFormerForTokenClassification", "XFRoformerForTokenClassification", ROFORMER, {"embedding_size": 40}),
    Case("RoFormerForQuestionAnswering", "XFRoformerForQuestionAnswering", ROFORMER),
    Case("RoFormerForMultipleChoice", "XFRoformerForMultipleChoice", ROFORMER),
    Case("DebertaV2Model", "XFDebertaModel", DEBERTA),
    Case("DebertaV2Model", "XFDebertaModel", DEBERTA_OWN, {"pos_att_type": ["c2p"]}),
    Case("DebertaV2Model", "XFDebertaModel", DEBERTA, {"max_relative_positions": 6, "pos_att_type": ["p2c"]}),
    Case("DebertaV2ForMaskedLM", "XFDebertaForMaskedLM", DEBERTA),
    Case("DebertaV2ForMaskedLM", "XFDebertaForMaskedLM", DEBERTA_OWN, {"tie_word_embeddings": False}),
    Case("DebertaV2ForMaskedLM", "XFDebertaForMaskedLM", DEBERTA, CONVOLUTION),
    Case("DebertaV2Model", "XFDebertaModel", DEBERTA_OWN, {"conv_kernel_size": 5}),
    Case("DebertaV2ForSequenceClassification", "XFDebertaForSequenceClassification", DEBERTA, {"num_labels": 3}),
    Case("DebertaV2ForTokenClassification", "XFDebertaForTokenClassification", DEBERTA_OWN),
    Case("DebertaV2ForQuestionAnswering", "XFDebertaForQuestionAnswering", DEBERTA),
    Case("DebertaV2ForMultipleChoice", "XFDebertaForMultipleChoice", DEBERTA, {"pooler_hidden_act": "tanh"}),
    Case("GPT2Model", "XFGPT2Model", GPT2),
    Case("GPT2LMHeadModel", "XFGPT2ForCausalLM", GPT2),
    Case("GPT2LMHeadModel", "XFGPT2ForCausalLM", GPT2, {"scale_attn_weights": False, "tie_word_embeddings": False}),
    Case("GPT2DoubleHeadsModel", "XFGPT2ForCausalLM", GPT2, complete=False),
    Case("GPT2ForSequenceClassification", "XFGPT2ForSequenceClassification", GPT2, {"num_labels": 3}),
    Case("GPT2ForTokenClassification", "XFGPT2ForTokenClassification", GPT2),
    Case("GPT2ForQuestionAnswering", "XFGPT2ForQuestionAnswering", GPT2),
    Case("OpenAIGPTModel", "XFGPTModel", GPT),
    Case("OpenAIGPTLMHeadModel", "XFGPTForCausalLM", GPT),
    Case("OpenAIGPTForSequenceClassification", "XFGPTForSequenceClassification", GPT, {"num_labels": 3}),
    Case("BartModel", "XFBartModel", BART),
    Case("BartModel", "XFBartModel", BART, {"scale_embedding": True, "activation_function": "gelu_new"}),
    Case("BartForConditionalGeneration", "XFBartForSeq2SeqLM", BART),
    Case("BartForCausalLM", "XFBartForCausalLM", BART, {"decoder_attention_heads": 4}, complete=False),
    Case("BartForQuestionAnswering", "XFBartForQuestionAnswering", BART),
    Case("BartForSequenceClassification", "XFBartForSequenceClassification", BART, complete=False),
    Case("T5Model", "XFT5Model", T5),
    Case("T5EncoderModel", "XFT5Model", T5),
    Case("T5ForConditionalGeneration", "XFT5ForSeq2SeqLM", T5),
    Case("T5ForConditionalGeneration", "XFT5ForSeq2SeqLM", T5_V1_1, {"feed_forward_proj": "gated-gelu"}),
    Case("T5ForConditionalGeneration", "XFT5ForSeq2SeqLM", T5_V1_1, {"feed_forward_proj": "gated-silu"}),
    Case("T5Model", "XFT5Model", T5_V1_1, {"feed_forward_proj": "gated-gelu"}),
    Case("T5ForQuestionAnswering", "XFT5ForQuestionAnswering", T5),
    Case("T5ForSequenceClassification", "XFT5ForSequenceClassification", T5, complete=False),
    Case("T5ForTokenClassification", "XFT5Model", T5, complete=False),
]
BY_NAME = {str(case): case for case in CASES}


@pytest.fixture(params=[case for case in CASES if case.complete], ids=str)
def complete_case(request) -> Case:
    """Every class whose every tensor converts."""
    return request.param


@pytest.fixture(
    params=[
        (case, side)
        for case in CASES
        for side in ("right", "left")
        if (case.pads_left() if side == "left" else case.pads_right())
    ],
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def padded_case(request) -> tuple[Case, str]:
    """Every class that converts, with padding on either side where transformers numbers positions rightly then."""
    return request.param


@pytest.fixture
def cases() -> dict[str, Case]:
    """The cases by name."""
    return BY_NAME


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
