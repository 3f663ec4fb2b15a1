"""The Conformer against transformers' two encoders of that kind, its equation, and a loop over alignments."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_xformers import XFConformerConfig, XFConformerForCTC, XFConformerModel
from tests.helpers import close, make_strong

D, HEADS, LAYERS, KERNEL = 16, 4, 2, 5
SIZES = {
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 24,
    "num_mel_bins": 10,
    "vocab_size": 6,
}


def ours(bias=True, final_norm=False, cls=XFConformerModel, **changes):
    block = {"type": "conformer", "conv_kernel": KERNEL, "bias": bias}
    residual = {"type": "pre_ln", "final_norm": final_norm}
    torch.manual_seed(0)
    model = cls(XFConformerConfig(**{**SIZES, "block": block, "residual": residual, **changes})).double().eval()
    for module in model.modules():
        if hasattr(module, "running_var"):  # of some data
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return make_strong(model)


def copied(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict({name: tensor.reshape(target.state_dict()[name].shape)
                            for name, tensor in source.state_dict().items()})  # fmt: skip


def copy_layer(layer, theirs, names):
    """Our layer's weights into one of transformers'."""
    part = {name: theirs.get_submodule(path) for name, path in names.items()}
    for number, mine in (("1", layer.feedforward), ("2", layer.feedforward_2)):
        copied(mine.up_proj, part[f"up_{number}"])
        copied(mine.down_proj, part[f"down_{number}"])
    frames = (layer.feedforward_residual, layer.attention_residual, layer.convolution_residual,
              layer.feedforward_2_residual.frame, layer.feedforward_2_residual)  # fmt: skip
    for frame, name in zip(frames, ("norm_ff1", "norm_att", "norm_conv", "norm_ff2", "norm_out")):
        copied(frame.norm, part[name])
    attention, convolution = layer.attention, layer.convolution
    for name in "qkvo":
        copied(getattr(attention, f"{name}_proj"), part[name])
    # Theirs has sine and cosine of one frequency side by side, ours all sines first.
    sines, cosines = attention.r_proj.weight.chunk(2, dim=1)
    part["r"].weight.copy_(torch.stack([sines, cosines], dim=-1).flatten(1))
    joined = [torch.cat([one, other]) for one, other in zip(convolution.up_proj.parameters(),
                                                           convolution.gate_proj.parameters())]  # fmt: skip
    for tensor, own in zip(part["glu"].parameters(), joined):
        tensor.copy_(own.reshape(tensor.shape))
    copied(convolution.depthwise, part["depthwise"])
    part["batch_norm"].load_state_dict(convolution.norm.state_dict(), strict=False)
    copied(convolution.down_proj, part["pointwise"])


WAV2VEC2 = {
    "up_1": "ffn1.intermediate_dense", "down_1": "ffn1.output_dense",
    "up_2": "ffn2.intermediate_dense", "down_2": "ffn2.output_dense",
    "norm_ff1": "ffn1_layer_norm", "norm_ff2": "ffn2_layer_norm", "norm_out": "final_layer_norm",
    "norm_att": "self_attn_layer_norm", "norm_conv": "conv_module.layer_norm",
    "q": "self_attn.linear_q", "k": "self_attn.linear_k", "v": "self_attn.linear_v", "o": "self_attn.linear_out",
    "r": "self_attn.linear_pos", "glu": "conv_module.pointwise_conv1", "depthwise": "conv_module.depthwise_conv",
    "batch_norm": "conv_module.batch_norm", "pointwise": "conv_module.pointwise_conv2",
}  # fmt: skip
PARAKEET = {
    "up_1": "feed_forward1.linear1", "down_1": "feed_forward1.linear2",
    "up_2": "feed_forward2.linear1", "down_2": "feed_forward2.linear2",
    "norm_ff1": "norm_feed_forward1", "norm_ff2": "norm_feed_forward2", "norm_out": "norm_out",
    "norm_att": "norm_self_att", "norm_conv": "norm_conv",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "r": "self_attn.relative_k_proj", "glu": "conv.pointwise_conv1", "depthwise": "conv.depthwise_conv",
    "batch_norm": "conv.norm", "pointwise": "conv.pointwise_conv2",
}  # fmt: skip


@torch.no_grad()
def test_parity_with_wav2vec2_conformer():
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    config = Wav2Vec2ConformerConfig(
        hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=LAYERS, intermediate_size=24, hidden_act="swish",
        position_embeddings_type="relative", conv_depthwise_kernel_size=KERNEL, max_source_positions=64,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2ConformerEncoder(config).double().eval()
    model = ours(bias=False, final_norm=True)
    for mine, layer in zip(model.trunk.layers, theirs.layers):
        copy_layer(mine, layer, WAV2VEC2)
        layer.self_attn.pos_bias_u.copy_(mine.attention.content_bias)
        layer.self_attn.pos_bias_v.copy_(mine.attention.position_bias)
    copied(model.trunk.final_norm, theirs.layer_norm)
    states = torch.randn(2, 19, D, dtype=torch.float64)
    found = model.trunk(inputs_embeds=states).last_hidden_state
    close(found, theirs(states).last_hidden_state, 1e-6)  # its sinusoids are in float32


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 7])
def test_parity_with_parakeet(padding):
    from transformers import ParakeetEncoderConfig
    from transformers.models.parakeet.modeling_parakeet import (
        ParakeetEncoderBlock,
        ParakeetEncoderRelPositionalEncoding,
    )

    config = ParakeetEncoderConfig(
        hidden_size=D, num_attention_heads=HEADS, num_hidden_layers=LAYERS, intermediate_size=24,
        conv_kernel_size=KERNEL, attn_implementation="sdpa",
    )  # fmt: skip
    model = ours()
    states = torch.randn(2, 19, D, dtype=torch.float64)
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, 19 - padding :] = False
    place = ParakeetEncoderRelPositionalEncoding(config)(states)
    expected = states
    for index, mine in enumerate(model.trunk.layers):
        layer = ParakeetEncoderBlock(config, index).double().eval()
        copy_layer(mine, layer, PARAKEET)
        layer.self_attn.bias_u.copy_(mine.attention.content_bias)
        layer.self_attn.bias_v.copy_(mine.attention.position_bias)
        pairs = (mask[:, :, None] & mask[:, None, :])[:, None]
        expected = layer(expected, attention_mask=pairs, position_embeddings=place)
    found = model.trunk(inputs_embeds=states, attention_mask=mask).last_hidden_state
    close(found[mask], expected[mask], 1e-6)


@torch.no_grad()
def test_without_first_step_and_convolution_it_is_a_pre_ln_layer():
    model = ours(num_hidden_layers=1)
    layer = model.trunk.layers[0]
    for projection in (layer.feedforward.down_proj, layer.convolution.down_proj):
        projection.weight.zero_()
        projection.bias.zero_()
    states = torch.randn(1, 9, D, dtype=torch.float64)
    attention, second = layer.attention, layer.feedforward_2

    entered = layer.attention_residual.norm(states)
    q, k, v = (getattr(attention, f"{name}_proj")(entered).view(9, HEADS, -1) for name in "qkv")
    rate = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    mixed = torch.zeros(9, HEADS, D // HEADS, dtype=torch.float64)
    for i, head in itertools.product(range(9), range(HEADS)):
        scores = []
        for j in range(9):
            angles = (i - j) * rate
            r = attention.r_proj(torch.cat([angles.sin(), angles.cos()])).view(HEADS, -1)[head]
            u, w = attention.content_bias[head], attention.position_bias[head]
            scores.append(((q[i, head] + u) @ k[j, head] + (q[i, head] + w) @ r) / (D // HEADS) ** 0.5)
        mixed[i, head] = torch.stack(scores).softmax(0) @ v[:, head]
    x = states + attention.o_proj(mixed.view(1, 9, D))
    frame = layer.feedforward_2_residual
    x = x + 0.5 * second.down_proj(F.silu(second.up_proj(frame.frame.norm(x))))
    close(model.trunk(inputs_embeds=states).last_hidden_state, frame.norm(x))


def test_the_convolution_module_is_its_equation():
    """In training, with batch statistics by torch's own batch norm of the real states."""
    model = ours(num_hidden_layers=1).train()
    module = model.trunk.layers[0].convolution
    x, real = torch.randn(2, 11, D, dtype=torch.float64), torch.ones(2, 11, dtype=torch.bool)
    real[1, 6:] = False
    context = model.trunk.make_context(x, real.long())
    found = module(x, context).output

    z = module.up_proj(x) * torch.sigmoid(module.gate_proj(x)) * real[..., None]
    conv = torch.zeros_like(z)
    for t, j in itertools.product(range(11), range(KERNEL)):
        if 0 <= t + j - KERNEL // 2 < 11:
            conv[:, t] += module.depthwise.weight[:, 0, j] * z[:, t + j - KERNEL // 2]
    conv = conv + module.depthwise.bias
    norm = nn.BatchNorm1d(D).double()
    norm.load_state_dict(module.norm.state_dict(), strict=False)
    with torch.no_grad():
        norm.running_mean.copy_(module.norm.running_mean)
    expected = module.down_proj(F.silu(norm(conv[real])))
    close(found[real], expected)
    found[real].sum().backward()  # which moves the statistics
    close(module.norm.running_mean, norm.running_mean)
    close(module.norm.running_var, norm.running_var)


def test_frames_are_subsampled_as_two_convolutions_say():
    model = ours()
    embedding = model.trunk.embedding
    sound = torch.randn(1, 10, 10, dtype=torch.float64)
    vectors, mask = embedding.read(sound, None)
    assert mask is None and vectors.shape == (1, 3, D)

    def convolved(image, conv):
        _, height, width = image.shape
        padded = F.pad(image, (1, 1, 1, 1))
        made = torch.zeros(D, (height + 1) // 2, (width + 1) // 2, dtype=torch.float64)
        for row, column in itertools.product(range(made.shape[1]), range(made.shape[2])):
            piece = padded[:, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            made[:, row, column] = (conv.weight * piece).sum((1, 2, 3)) + conv.bias
        return made.relu()

    twice = convolved(convolved(sound, embedding.conv_1), embedding.conv_2)
    expected = embedding.tokens(twice.transpose(0, 1).flatten(1))
    close(vectors[0], expected)


def collapsed(path, blank):
    return [label for label, _ in itertools.groupby(path) if label != blank]


def brute_force(log_probs, labels, blank=0):
    frames, count = log_probs.shape
    total = [
        sum(log_probs[t, label] for t, label in enumerate(path))
        for path in itertools.product(range(count), repeat=frames)
        if collapsed(path, blank) == labels
    ]
    return torch.stack(total).logsumexp(0) if total else torch.tensor(-torch.inf)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_is_that_of_all_alignments(reduction):
    model = ours(cls=XFConformerForCTC, vocab_size=4, ctc_loss_reduction=reduction)
    mask = torch.ones(3, 16)
    mask[1, 9:] = 0
    sound = torch.randn(3, 16, 10, dtype=torch.float64)
    labels = torch.tensor([[2, 2, 1], [3, -100, 1], [1, 2, 3]])
    labels[2] = torch.tensor([1, -100, 0])  # 0 is the blank: padding
    output = model(sound, mask, labels=labels)
    log_probs = output.logits.log_softmax(-1)
    rows = [([2, 2, 1], 4), ([3, 1], 3), ([1], 4)]
    nll = [-brute_force(log_probs[row, :states], true) for row, (true, states) in enumerate(rows)]
    expected = sum(nll) if reduction == "sum" else sum(loss / len(true) for loss, (true, _) in zip(nll, rows)) / 3
    close(output.loss, expected)
    # 6 labels; Trainer, who does not know of the blank, counts 7.
    close(model(sound, mask, labels=labels, num_items_in_batch=7).loss, sum(nll) / 6)
    theirs = type(model).loss_function  # transformers' own, by the class's name
    assert theirs is not None
    from transformers.loss.loss_ctc import ForCTCLoss

    by_them = ForCTCLoss(output.logits, labels, output.frame_mask.sum(-1), 0, reduction=reduction)
    close(output.loss.float(), by_them, 1e-5)


def test_a_row_that_does_not_fit():
    """Counts as nothing, or as infinite."""
    sound, labels = torch.randn(1, 8, 10, dtype=torch.float64), torch.tensor([[1, 1]])
    assert ours(cls=XFConformerForCTC)(sound, labels=labels).loss == 0
    assert ours(cls=XFConformerForCTC, ctc_zero_infinity=False)(sound, labels=labels).loss == torch.inf


def test_transcribe_reads_real_states_alone():
    model = ours(cls=XFConformerForCTC)
    sound, mask = torch.randn(3, 24, 10, dtype=torch.float64), torch.ones(3, 24)
    mask[1, :13], mask[2] = 0, 0
    alone = [model.transcribe(sound[:1]), model.transcribe(sound[1:2, 13:])]
    assert model.transcribe(sound, mask) == [alone[0][0], alone[1][0], []]
    searched = model.transcribe(sound, mask, num_beams=4)
    assert searched[0] == model.transcribe(sound[:1], num_beams=4)[0] and searched[2] == []
    with pytest.raises(ValueError, match="`num_beams` must be at least 1, got 0"):
        model.transcribe(sound, num_beams=0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="needs an odd `conv_kernel`, got 32; take 31 or 33"):
        XFConformerConfig(block={"type": "conformer", "conv_kernel": 32})
    with pytest.raises(ValueError, match="set `conv_norm` to 'layer' there"):
        XFConformerConfig(is_decoder=True)
    with pytest.raises(ValueError, match="normalizes the stream at the end of a layer"):
        XFConformerConfig(stack="reversible", attention="dense")
    with pytest.raises(ValueError, match="`num_mel_bins` must be at least 1, got 0"):
        XFConformerConfig(num_mel_bins=0)
