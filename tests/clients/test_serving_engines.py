"""A serving engine, written as vLLM's is: an attention function of its own, and keys and values in its hands.

Each call of the model has the next tokens of several texts in one row, each with its position.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_xformers import XFormerConfig
from hf_xformers.conversion import from_transformers
from hf_xformers.core.serving import why_not_served
from hf_xformers.variants import config_class, family, model_types
from tests.common.cases import CASES, defaults
from tests.helpers import PAD, close, tokens

CALL = {}  # of the call that runs: how many tokens of each text are in its row


class Keys:
    """Attention of one layer, with the keys and values of all texts so far. causal: whether it keeps any."""

    def __init__(self, causal):
        self.causal, self.kept = causal, {}

    def forward(self, query, key, value):  # [tokens, heads, width]
        outputs, start = [], 0
        for text, count in CALL["texts"].items():
            rows = slice(start, start + count)
            start += count
            found = (key[rows], value[rows])
            if self.causal:
                found = tuple(torch.cat(pair) for pair in zip(self.kept.get(text, ()), found)) or found
                self.kept[text] = found
            keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in found)
            scores = torch.einsum("qhd,khd->hqk", query[rows], keys) * self.scale
            if self.causal:
                later = torch.ones(scores.shape[1:]).triu(keys.shape[0] - count + 1).bool()
                scores = scores.masked_fill(later, -torch.inf)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        return torch.cat(outputs).flatten(1)


def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    assert attention_mask is None and query.shape[0] == 1
    instance = attention_instances[module.layer_idx]
    instance.scale = scaling
    return instance.forward(*(x[0].transpose(0, 1) for x in (query, key, value))), None


@pytest.fixture(autouse=True)
def engine():
    ALL_ATTENTION_FUNCTIONS["engine"] = attend
    yield
    del ALL_ATTENTION_FUNCTIONS["engine"]


def served(model):
    """The base model under the engine, and its instances by layer."""
    model.set_attn_implementation("engine")
    base = model.base_model
    assert type(base).is_backend_compatible() and base.is_backend_compatible()
    causal = all(getattr(module, "is_causal", True) for module in base.modules())
    return base, {index: Keys(causal) for index in range(model.config.num_hidden_layers)}


def call(base, instances, texts, positions):
    """The last states [tokens, D] of all texts. texts: ids [t] by number; positions: of their first tokens."""
    CALL["texts"] = {number: len(ids) for number, ids in texts.items()}
    places = [torch.arange(len(ids)) + positions[number] for number, ids in texts.items()]
    outputs = base(
        input_ids=torch.cat(list(texts.values()))[None],
        position_ids=torch.cat(places)[None],
        use_cache=False,
        attention_instances=instances,
        return_dict=False,
    )
    return outputs[0][0]


def generate(model, prompts, steps):
    base, instances = served(model)
    texts, written = dict(enumerate(prompts)), {number: [] for number in range(len(prompts))}
    positions = dict.fromkeys(texts, 0)
    for _ in range(steps):
        states = call(base, instances, texts, positions).split([len(ids) for ids in texts.values()])
        for number, own in enumerate(states):
            positions[number] += len(own)
            texts[number] = model.lm_head(own[-1:]).argmax(-1)
            written[number].append(int(texts[number]))
    model.set_attn_implementation("sdpa")
    return written


def gpt2():
    config = config_class("xf_gpt2")(
        vocab_size=99, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64
    )
    return family("xf_gpt2")["ForCausalLM"](config)


def llama():
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return from_transformers(LlamaForCausalLM(LlamaConfig(vocab_size=99, intermediate_size=64, **sizes)))


@pytest.mark.parametrize("build", [gpt2, llama])
@torch.no_grad()
def test_generation_by_hand(build):
    """Texts of several lengths, prefilled together and continued token by token, are those that `generate` gives."""
    torch.manual_seed(0)
    model = build().double().eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    prompts = [tokens(4), tokens(7, seed=1), tokens(1, seed=2)]
    expected = {}
    for number, prompt in enumerate(prompts):
        given = {"min_new_tokens": 6, "max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
        expected[number] = model.generate(prompt[None], **given)[0, len(prompt) :].tolist()
    assert len({tuple(ids) for ids in expected.values()}) == 3
    assert generate(model, prompts, 6) == expected


SERVED = [case for case in CASES if not why_not_served(case.preset)]


@pytest.mark.parametrize("case", SERVED, ids=str)
@torch.no_grad()
def test_every_model_that_says_so(case):
    model, texts = case.build(), {0: tokens(6), 1: tokens(3, seed=1)}
    expected = [model.base_model(ids[None]).last_hidden_state[0] for ids in texts.values()]
    base, instances = served(model)
    close(call(base, instances, texts, dict.fromkeys(texts, 0)), torch.cat(expected))


def test_which_models_say_so():
    """An engine asks the class before it builds a model."""
    names = {case.name for case in SERVED}
    assert {"xf_bert", "xf_gpt2", "xf_roformer", "modern"} <= names
    for name in model_types():
        assert family(name)["Model"]._supports_attention_backend is not bool(why_not_served(defaults(name)))
    for name in ("xf_performer", "xf_longformer", "xf_delta_net", "xf_t5", "xf_switch_transformer", "xf_deberta"):
        assert not family(name)["Model"].is_backend_compatible()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention": "performer"}, "attention 'performer'"),
        ({"attention": {"type": "dense", "score_cap": 30.0}}, "attention 'dense', as it is set,"),
        ({"position": "alibi"}, "position 'alibi'"),
        ({"stack": "universal", "position": "none"}, "several depths"),
        ({"block": "conformer", "position": "none"}, "block 'conformer'"),
        ({"head": "transform", "is_decoder": True}, "head 'transform'"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_others_refuse(fields, named):
    config = XFormerConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2, intermediate_size=16, **fields)
    model = AutoModel.from_config(config)
    assert not model._supports_attention_backend and config.base_model_pp_plan is None
    model.set_attn_implementation("engine")
    with pytest.raises(ValueError, match=f"`attention_instances` and keeps keys and values itself.*{named}"):
        model(tokens(1, 5), attention_instances={})
    model.set_attn_implementation("sdpa")
    with pytest.raises(TypeError, match="reads the argument `attention_instances`"):
        model(tokens(1, 5), attention_instances={})


class Placeholder(nn.Identity):
    """What an engine puts where another process has the module."""

    def forward(self, *args, **kwargs):
        return args[0]


@torch.no_grad()
def test_layers_divided_among_processes():
    torch.manual_seed(0)
    model, texts = gpt2().double().eval(), {0: tokens(6), 1: tokens(3, seed=1)}
    base, instances = served(model)
    expected = call(base, instances, texts, dict.fromkeys(texts, 0))
    places = torch.cat([torch.arange(len(ids)) for ids in texts.values()])[None]
    states = None
    for rank, own in enumerate([(0, 1), (2,)]):
        part = gpt2().double().eval()
        part.load_state_dict(model.state_dict())
        base, instances = served(part)
        before, layers, after = base._pp_plan
        if rank > 0:
            base.set_submodule(before, Placeholder())
            assert isinstance(base.get_input_embeddings(), Placeholder)
        else:
            base.set_submodule(after, Placeholder())
        for index in set(range(3)) - set(own):
            base.get_submodule(layers)[index] = Placeholder()
        given = {"input_ids": torch.cat(list(texts.values()))[None]} if states is None else {"inputs_embeds": states}
        more = {"attention_instances": instances, "use_cache": False, "return_dict": False}
        states = base(**given, position_ids=places, **more)[0]
    close(states[0], expected)
