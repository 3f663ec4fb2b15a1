"""What holds for the whole suite: which files run first, what the garbage collector looks at, and failures that are
named when they happen."""

import gc
from pathlib import Path

import pytest

from hf_xformers.core.other_families import FAMILIES
from tests.reporting import Failures, FirstLook, Progress, first_look

# Files whose first test makes, in several processes, what all their tests read. At the start of a run one worker gets
# them whole; near its end, where the workers share out what is left, each would make it for itself.
FIRST = ("test_distributed.py", "test_expert_parallel.py", "test_sequence_parallel.py")
SECONDS = 660  # that it may take: seven processes on two cores, which are busy with seven others


def pytest_collection_modifyitems(config, items):
    if config.getoption("quick"):
        items[:], left_out = first_look(items)
        config.hook.pytest_deselected(items=left_out)
    else:
        items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        if item.path.name in FIRST:
            item.add_marker(pytest.mark.timeout(SECONDS))


def out_of_sight():
    """Takes what lives as long as the run (libraries, tens of thousands of tests, and later the models that tests
    share) out of the garbage collector's sight. Otherwise going through it again and again takes a third of the
    suite's time: Trainer alone does so at the start of every training."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    gc.freeze()  # to look for garbage first would take a second and find a few megabytes
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def families():
    """A family that a test makes is no variant to the tests after it."""
    before = dict(FAMILIES)
    yield
    for model_type in FAMILIES.keys() - before.keys():
        del FAMILIES[model_type]


class Files:
    """Between two files, when their fixtures are gone, what is left is there to stay."""

    def __init__(self):
        self.path = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if item.path != self.path:
            self.path = item.path
            out_of_sight()


def pytest_addoption(parser):
    group = parser.getgroup("hf_xformers")
    group.addoption("--quick", action="store_true", help="a first look: a few tests of every file")
    group.addoption("--progress", metavar="FILE", help="say how far the run is, and write a summary to FILE")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    gc.disable()  # until all tests are known: nothing that is made on the way there goes away
    config.pluginmanager.register(Files(), "what files leave")
    if config.getoption("quick"):
        config.pluginmanager.register(FirstLook(), "the time of a first look")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        file = config.getoption("progress")
        plugin = Progress(terminal, Path(file)) if file else Failures(terminal)
        config.pluginmanager.register(plugin, "failures as they come")
