"""The registry: names are found, never silently replaced, and come from other packages too."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from dataclasses import dataclass

import pytest

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """Whatever a test enters is gone afterwards; what is built in is there before, since modules load only once."""
    for category in ("solver", "weighting", "server", "metric"):
        registry.everything(category)
    monkeypatch.setattr(registry, "_rules", {category: dict(rules) for category, rules in registry._rules.items()})
    monkeypatch.setattr(registry, "_directions", dict(registry._directions))
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))


def test_built_in_rules_are_found_by_walking_their_room():
    assert {"samples", "uniform", "nova"} <= set(registry.names("weighting"))
    assert registry.find("solver", "scaffold").__name__ == "Scaffold"
    assert registry.names("server") == sorted(registry.names("server"))


LAZY = """
import sys
from fedalloy.core import registry
assert "flower" in registry.names("engine")
registry.find("engine", "loop")
assert "fedalloy.flower" not in sys.modules, "imported though nobody asked for it"
assert registry.find("engine", "flower").__module__ == "fedalloy.flower.engine"
assert set(registry.everything("engine")) == set(registry.names("engine"))
"""


def test_a_rule_of_a_higher_package_is_imported_when_it_is_asked_for():
    subprocess.run([sys.executable, "-c", LAZY], check=True)


def test_a_taken_name_is_refused_and_the_first_rule_stays():
    first = registry.find("weighting", "samples")
    with pytest.raises(
        RegistryError, match=r"weighting 'samples' is taken by fedalloy\.methods\.weightings\.samples\.Samples"
    ):

        @registry.register("weighting", "samples")
        class Other: ...

    assert registry.find("weighting", "samples") is first


def test_a_module_imported_again_may_replace_its_own_rule():
    def make():
        class Mine: ...

        return Mine

    first, second = make(), make()
    registry.register("weighting", "mine")(first)
    registry.register("weighting", "mine")(second)
    assert registry.find("weighting", "mine") is second


def test_an_unknown_rule_lists_what_there_is_and_the_nearest_spelling():
    with pytest.raises(
        RegistryError, match=r"unknown weighting 'sampels': did you mean 'samples'\? allowed: .*uniform"
    ):
        registry.find("weighting", "sampels")


@pytest.mark.parametrize("direction", [True, False, None])
def test_a_metric_says_which_way_is_better(direction):
    @registry.register("metric", "mine", higher_is_better=direction)
    class Mine: ...

    assert registry.find("metric", "mine") is Mine
    assert registry.direction("mine") is direction
    assert registry.direction("nobody's") is None


def test_a_metric_that_does_not_say_which_way_is_better_is_refused():
    with pytest.raises(RegistryError, match=r"metric 'mine' does not declare its direction.*higher_is_better=True"):
        registry.register("metric", "mine")
    with pytest.raises(RegistryError, match="higher_is_better is 'no'; allowed are True, False and None"):
        registry.register("metric", "mine", higher_is_better="no")  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match="only a metric has a direction"):
        registry.register("weighting", "mine", higher_is_better=True)


def test_an_unknown_room_is_named():
    with pytest.raises(RegistryError, match=r"unknown category 'wieghting': did you mean 'weighting'"):
        registry.names("wieghting")


def test_the_name_of_a_rule_that_nobody_registered():
    @dataclass(frozen=True)
    class Loose: ...

    with pytest.raises(RegistryError, match="decorate it with @register"):
        registry.name_of("weighting", Loose)


def test_other_packages_publish_rules_through_entry_points(monkeypatch):
    module = types.ModuleType("plugged_in_rules")
    exec(
        "from dataclasses import dataclass\n"
        "from fedalloy.core.registry import register\n"
        "@register('weighting', 'plugged')\n"
        "@dataclass(frozen=True)\n"
        "class Plugged: ...\n",
        module.__dict__,
    )
    del registry._rules["weighting"]["plugged"]
    asked = []

    class Point:
        def load(self):
            registry.register("weighting", "plugged")(module.__dict__["Plugged"])

    def points(group):
        asked.append(group)
        return [Point()]

    monkeypatch.setattr(registry, "entry_points", points)
    monkeypatch.setattr(registry, "_loaded", set())
    assert registry.find("weighting", "plugged").__name__ == "Plugged"
    assert set(asked) == {"fedalloy.rules"}


def test_a_real_entry_point_object_is_loaded(monkeypatch, tmp_path):
    (tmp_path / "fedalloy_toy_plugin.py").write_text(
        "from dataclasses import dataclass\nfrom fedalloy.core.registry import register\n\n"
        "@register('server', 'toy')\n@dataclass(frozen=True)\nclass Toy: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("toy", "fedalloy_toy_plugin", "fedalloy.rules")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(registry, "_loaded", set())
    assert "toy" in registry.names("server")
    sys.modules.pop("fedalloy_toy_plugin")


def test_a_broken_plug_in_fails_every_time_not_only_once(monkeypatch):
    class Broken:
        def load(self):
            raise ImportError("no such module")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Broken()])
    monkeypatch.setattr(registry, "_loaded", set())
    for _ in range(2):
        with pytest.raises(ImportError, match="no such module"):
            registry.names("weighting")
