"""Every architecture in `architectures/`: equal outputs and losses with padding on either side, both ways, exact
tensors and configs back, and the same generated text."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers

from hf_xformers.conversion import base, from_transformers, lookup, to_transformers
from tests.conversion.architectures import LENGTH, LENGTHS, Architecture, architectures
from tests.conversion.test_configs import fates

ALL = architectures()
IGNORED = {"transformers_version", "architectures", "dtype", "_name_or_path", "torch_dtype"}


SINGLE = (
    "logits",
    "reconstruction",
    "loss",
    "pooler_output",
    "prediction_logits",
    "seq_relationship_logits",
    "sop_logits",
    "start_logits",
    "end_logits",
)
ROWS = ("last_hidden_state", "encoder_last_hidden_state")
LISTS = ("hidden_states", "decoder_hidden_states", "encoder_hidden_states")


def valid(tensor, name, given):
    """The part of an output that belongs to real tokens. A pooler reads the first token, which must be real. Images
    are real everywhere."""
    if "attention_mask" not in given:
        return tensor
    mask = given["attention_mask"].bool()
    pooled = name in ("pooler_output", "seq_relationship_logits", "sop_logits") or (
        name == "logits" and tensor.ndim == 2
    )
    if pooled and not mask[..., 0].all():
        return (
            tensor[mask[..., 0]]
            if tensor.shape[: mask.ndim - 1] == mask.shape[:-1]
            else tensor[mask[..., 0].flatten()]
        )
    if "decoder_attention_mask" in given and not name.startswith("encoder"):
        mask = given["decoder_attention_mask"].bool()
    if mask.ndim == 3:  # multiple choice runs its choices as rows
        mask = mask.flatten(0, 1)
    return tensor[mask] if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape else tensor


def outputs(model, given):
    with torch.no_grad():
        out = model(**given, output_hidden_states=True)
    found = {name: out[name] for name in (*SINGLE, *ROWS) if out.get(name) is not None}
    for name in LISTS:
        for index, tensor in enumerate(out.get(name) or ()):
            found[f"{name}.{index}"] = tensor
    return {name: valid(tensor, name, given) for name, tensor in found.items()}


def pairs(kinds: str = "classes"):
    return [
        pytest.param(entry, head, id=f"{entry}-{head}") for entry in ALL.values() for head in getattr(entry, kinds)
    ]


def variations():
    return [pytest.param(entry, name, id=f"{entry}-{name}") for entry in ALL.values() for name in entry.variations]


@functools.cache
def _converted(name: str, head: str):
    model = ALL[name].make(head)
    before = copied(model)
    return model, from_transformers(model), before


def converted(entry: Architecture, head: str):
    """Theirs, ours of it, and what its tensors were before: made once, for all tests that only read them."""
    return _converted(str(entry), head)


def copied(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differences(entry: Architecture, theirs, ours, given, without: tuple[str, ...] = ()) -> dict[str, float]:
    """The largest difference of each output that both have, of real tokens, relative to the largest value of it."""
    back = {mine: name for name, mine in entry.renamed.items()}
    expected = outputs(theirs, {back.get(name, name): tensor for name, tensor in given.items()})
    expected = {entry.renamed.get(name, name): out for name, out in expected.items()}
    if type(theirs).__name__ in entry.headless and "MultipleChoice" in type(theirs).__name__:
        given = {name: tensor.flatten(0, 1) for name, tensor in given.items()}  # a bare model reads rows
    got = outputs(ours, given)
    if entry.raw_last_state:
        without = (*without, f"hidden_states.{theirs.config.num_hidden_layers}")
    shared = {name for name in expected.keys() & got.keys() if not {name, name.split(".")[0]} & {*without}}
    found = {}
    for name in sorted(shared - {*entry.uncompared}):
        assert expected[name].shape == got[name].shape, name
        assert expected[name].isfinite().all(), name
        scale = max(float(expected[name].abs().max()), 1.0)
        found[name] = float((expected[name] - got[name]).abs().max()) / scale
    assert found
    return found


def assert_same(entry: Architecture, theirs, ours, given, without: tuple[str, ...] = ()) -> set[str]:
    """Equal outputs; the names that were compared."""
    found = differences(entry, theirs, ours, given, without)
    wrong = {name: value for name, value in found.items() if not value < entry.tolerance}
    assert not wrong, wrong
    return {*found}


def round_trip(entry: Architecture, model, head: str):
    """Ours, and theirs again, from `model`, which stays as it is."""
    before = copied(model)
    ours = from_transformers(model)
    return ours, converted_back(entry, head, model, ours, before)


def converted_back(entry: Architecture, head: str, model, ours, before: dict[str, torch.Tensor]):
    """Theirs again, from `ours`; `model`, the source of it, is as it was `before`."""
    assert ours.config.model_type == entry.ours
    back = to_transformers(ours, model_type=entry.model_type)
    assert type(back).__name__ == entry.back_as.get(head, head)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())  # source untouched
    return back


def assert_exact(model, back, idle: tuple[str, ...] = ()) -> None:
    """The same tensors and config; idle: ends of names of tensors that may differ."""
    before, after = model.state_dict(), back.state_dict()
    assert after.keys() == before.keys()
    different = [name for name in before if not torch.equal(before[name], after[name])]
    assert [name for name in different if not name.endswith(idle)] == []
    old, new = model.config.to_dict(), back.config.to_dict()
    assert {k: v for k, v in old.items() if k not in IGNORED} == {k: v for k, v in new.items() if k not in IGNORED}


@pytest.mark.parametrize(("entry", "head"), pairs())
def test_outputs_and_losses_agree(entry, head):
    model, ours, _ = converted(entry, head)
    assert type(ours).__name__.endswith(entry.classes[head])
    dropped = ("logits", "loss") if head in entry.headless else ()
    for side in ("right",) if head in entry.first_slot else entry.sides:
        given = entry.given(head, side)
        assert_same(entry, model, ours, given, without=dropped)
    if dropped or entry.classes[head] == "Model":
        return
    whole = entry.classes[head] in ("ForQuestionAnswering", "ForMultipleChoice") or head in entry.unpadded_losses
    given = entry.given(head, lengths=(LENGTH,) * len(LENGTHS) if whole else LENGTHS)
    model, ours = copy.deepcopy((model, ours))  # a loss writes to the config which kind of problem it is
    names = assert_same(entry, model, ours, {**given, **entry.labels(head, given, model.config.num_labels)})
    assert "loss" in names


@pytest.mark.parametrize(("entry", "head"), pairs("heads"))
def test_round_trip_is_exact(entry, head):
    model, ours, before = converted(entry, head)
    back = converted_back(entry, head, model, ours, before)
    if head not in entry.back_as:
        assert_exact(model, back, entry.idle.get(head, ()))


@pytest.mark.parametrize(("entry", "name"), variations())
def test_variations_agree(entry, name):
    changes = entry.variations[name]
    head = entry.tried_with.get(name) or entry.generating() or next(iter(entry.heads))
    model = entry.make(head, **changes)
    ours, back = round_trip(entry, model, head)
    assert_exact(model, back, entry.idle.get(head, ()))
    given = entry.given(head)
    assert_same(entry, model, ours, given, without=entry.apart.get(name, ()))
    plain = converted(entry, head)[0].config.to_dict()
    assert {k: v for k, v in model.config.to_dict().items() if k not in IGNORED} != {
        k: v for k, v in plain.items() if k not in IGNORED
    }


@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ALL.values()])
def test_ours_first(entry):
    """A model that starts here goes there with the same outputs."""
    head = list(entry.heads)[-1]
    _, template, _ = converted(entry, head)
    torch.manual_seed(3)
    ours = type(template)(copy.deepcopy(template.config)).eval()
    theirs = to_transformers(ours, model_type=entry.model_type)
    assert_same(entry, theirs, ours, entry.given(head))
    again = from_transformers(theirs).state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again[name]), name


def greedy(model, ids: torch.Tensor, count: int = 8) -> torch.Tensor:
    """The likeliest text as forward calls of whole rows say."""
    for _ in range(count):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize(
    ("entry", "head"),
    [pytest.param(entry, entry.generating(), id=str(entry)) for entry in ALL.values() if entry.generating()],
)
def test_generation_with_caches_agrees(entry, head):
    model = entry.make(head, seed=5)
    ours = from_transformers(model)
    side = "left" if not model.config.is_encoder_decoder and entry.left_prompts else "right"
    lengths = LENGTHS if side == "left" or model.config.is_encoder_decoder else (LENGTH,) * len(LENGTHS)
    given = entry.given(head, side, lengths)
    prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    if not entry.generates_as_forward:
        assert torch.equal(ours.generate(**prompt, **options, eos_token_id=-1), greedy(model, given["input_ids"]))
        return
    expected = model.generate(**prompt, **options)
    assert torch.equal(ours.generate(**prompt, **options), expected)
    assert len(expected.unique()) > 2  # the text is not one token over and over


@pytest.mark.parametrize("entry", [pytest.param(entry, id=str(entry)) for entry in ALL.values()])
def test_no_field_of_theirs_is_lost(entry):
    """It comes back, or is refused, or is reported, or is listed as unread."""
    found = fates(lookup.converter_for(entry.model_type), entry.config, entry.other_values)
    assert found == {"refused": entry.refused, "noted": entry.noted, "unread": entry.unread}


def test_every_converter_is_tried():
    both_ways = {name for name, entry in base.converters().items() if not entry.layouts}
    assert both_ways == {entry.model_type for entry in ALL.values()}
    for entry in ALL.values():
        known = {head.theirs for head in lookup.converter_for(entry.model_type).heads}
        assert known == set(entry.classes), entry
        assert all(hasattr(transformers, name) for name in entry.classes)
