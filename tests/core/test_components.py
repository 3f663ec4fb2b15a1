"""Specs, slots and their registries."""

import subprocess
import sys
from typing import Literal

import pytest

from hf_xformers import Spec, build_spec, register
from hf_xformers.core.components import SLOTS, Slot, aliased, names


@pytest.fixture
def slot(monkeypatch):
    """A slot of its own, so that nothing real is touched."""
    slot = Slot("tasting", room="position")
    slot._complete = True
    slot._import_room = lambda module=None: None
    monkeypatch.setitem(SLOTS, "tasting", slot)
    return slot


def make(name="plain", **options):
    @register("tasting", name, **options)
    class Tasting(Spec):
        cups: int = 2
        kind: Literal["tea", "coffee"] = "tea"
        sizes: tuple[int, ...] | None = None
        strength: float | int = 0.5

        def check_fields(self):
            if self.cups < 1:
                raise ValueError(f"tasting needs `cups` >= 1, got {self.cups}.")

    return Tasting


def test_registering(slot):
    cls = make("plain", aliases=("simple",))
    assert (cls.slot, cls.type) == ("tasting", "plain") and list(slot) == ["plain"] == names("tasting")
    assert slot.get("plain") is slot.get("simple") is cls
    for value in ("plain", "simple", {"type": "simple"}, cls()):
        spec = build_spec("tasting", value)
        assert type(spec) is cls and spec == cls() and spec.to_dict()["type"] == "plain"


def test_a_name_belongs_to_one_class(slot):
    first = make()
    slot.add(first, "plain")  # the same class again, as after a reload
    other = type("Other", (first,), {"__qualname__": "Other"})
    with pytest.raises(ValueError, match=r"tasting component 'plain' is already registered by .*test_components"):
        slot.add(other, "plain")
    slot.add(first, "plain", ("simple",))
    for taken in (("simple", ()), ("bitter", ("plain",)), ("bitter", ("simple",))):
        with pytest.raises(ValueError, match=r"tasting component '(plain|simple)' is already registered by"):
            slot.add(other, *taken)


def test_what_can_be_registered():
    with pytest.raises(ValueError, match="There is no slot 'attn'. .*attention"):
        register("attn", "mine")
    with pytest.raises(TypeError, match="Odd is no spec; derive it from"):
        register("attention", "mine")(type("Odd", (), {"__qualname__": "Odd"}))


def test_values_are_checked(slot):
    make()
    for field, value, message in (
        ("cups", "three", "Wrong value for tasting 'plain': Field 'cups' expected int, got str"),
        ("cups", 2.0, "Field 'cups' expected int, got float"),
        ("kind", "milk", "Field 'kind' expected one of .*'coffee'.*got milk"),
        ("sizes", [1, "x"], "Field 'sizes'"),
        ("strength", "much", "Field 'strength'"),
    ):
        with pytest.raises(TypeError, match=message):
            build_spec("tasting", {"type": "plain", field: value})
    with pytest.raises(ValueError, match="`cups` >= 1, got 0"):
        build_spec("tasting", {"type": "plain", "cups": 0})
    spec = build_spec("tasting", "plain")
    with pytest.raises(Exception, match="cups"):
        spec.cups = "three"
    spec.cups = 0
    with pytest.raises(ValueError, match="`cups` >= 1, got 0"):  # a spec that was changed is checked again
        build_spec("tasting", spec)


def test_a_field_may_have_further_names(slot):
    @register("tasting", "wide")
    class Wide(Spec):
        tasting_window: int = aliased(512, "window")

    for name in ("window", "tasting_window"):
        assert build_spec("tasting", {"type": "wide", name: 8}).to_dict() == {"type": "wide", "tasting_window": 8}
    assert Wide().tasting_window == 512
    with pytest.raises(ValueError, match="'tasting_window' of tasting 'wide' is given twice"):
        build_spec("tasting", {"type": "wide", "window": 8, "tasting_window": 8})
    with pytest.raises(ValueError, match=r"Did you mean 'window'\? Its fields are: tasting_window \(or window\)"):
        build_spec("tasting", {"type": "wide", "windw": 8})
    with pytest.raises(ValueError, match="both as a field and as an alias"):

        @register("tasting", "clash")
        class Clash(Spec):
            window: int = 1
            size: int = aliased(2, "window")


def test_lists_of_json_become_tuples(slot):
    make()
    spec = build_spec("tasting", {"type": "plain", "sizes": [1, 2]})
    assert spec.sizes == (1, 2)
    assert spec.to_dict() == {"type": "plain", "cups": 2, "kind": "tea", "sizes": [1, 2], "strength": 0.5}
    assert build_spec("tasting", spec.to_dict()) == spec


def test_the_callers_dict_stays(slot):
    make()
    given = {"type": "plain", "sizes": [1, 2]}
    build_spec("tasting", given)
    assert given == {"type": "plain", "sizes": [1, 2]}


def test_unknown_slot():
    with pytest.raises(ValueError, match="Unknown slot 'atention'; the slots are: embedding, position, attention"):
        names("atention")


def test_self_and_cross_attention_share_names():
    assert SLOTS["attention"] is SLOTS["cross_attention"]
    spec = build_spec("attention", "dense")
    assert build_spec("cross_attention", spec) is spec


def test_a_room_without_modules_builds_nothing():
    class Bare(Spec):
        pass

    with pytest.raises(NotImplementedError, match="Bare does not say which module it builds"):
        Bare().build(None)


@pytest.mark.parametrize("slot_name", [name for name in SLOTS if name != "cross_attention"])
def test_every_component(slot_name):
    """All registered specs: default fields are valid, the dict comes back, there is a summary for lists."""
    assert names(slot_name) == sorted(set(names(slot_name))) and names(slot_name)
    for name in names(slot_name):
        cls = SLOTS[slot_name].get(name)
        assert cls.summary, name
        assert cls.__doc__ and cls.__doc__.strip(), name
        assert (cls.slot, cls.type) == (slot_name, name)
        if any(field.default is field.default_factory for field in cls.__dataclass_fields__.values()):
            continue  # a field without a default: it has to be given
        spec = build_spec(slot_name, name)
        assert build_spec(slot_name, spec.to_dict()) == spec


def test_a_lookup_imports_one_file():
    """Naming a component imports its own file and what that needs, not its room."""
    program = (
        "import sys; from hf_xformers import build_spec; build_spec('position', 'rotary');"
        "print(sorted(name for name in sys.modules if name.startswith('hf_xformers.position.')))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    files = [
        f"hf_xformers.position.{name}" for name in ("base", "distances", "rotary", "rotary_scaling", "score_terms")
    ]
    assert output.strip() == str(files)
