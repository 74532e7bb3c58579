"The setup of all tests: one thread a worker, Hypothesis without deadlines, and the CPU seconds of each test"
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import resource
from collections import Counter
from fractions import Fraction
from functools import cache
from time import process_time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import house

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=slow)
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=slow)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
settings.load_profile(PROFILE)

BUDGET = 1900      # CPU seconds of the whole suite on the reference machine; runs measure 1,600
REFERENCE = .16    # CPU seconds that `yardstick` takes there while two workers run
EVERY = 30         # CPU seconds of a worker between two yardsticks
WHOLE = 55         # notebooks: a run with fewer of them is a part of the suite, and has no budget
SPENT, WORKERS, YARDSTICKS = Counter(), [], []


gc.disable()   # until all is collected and loaded, which stays as long as the process does
def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()

def pytest_unconfigure(): gc.unfreeze()   # some modules report at exit what was not collected


def used():
    "CPU seconds of this process, of the children that have ended, and of the notebooks"
    own = [sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return house.SPENT.seconds + sum(own)


@cache
def small_layer():
    "A layer of a transformer and its input; the seeds of the tests stay as they are"
    import torch
    with torch.random.fork_rng(): layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.)
    return layer.requires_grad_(False), torch.ones(1, 8, 64)


def yardstick():
    """CPU seconds of a fixed piece of what the suite does: passes of a small layer, a law in fractions

    Where neighbours share the cores, small operations of torch take up to 1.9 times as long, fractions 1.15
    times, the suite 1.4 times; large products of matrices and short loops, which caches hold, 1.1 times"""
    (layer, x), start = small_layer(), process_time()
    for _ in range(500): layer(x)
    for _ in range(160):
        law = {(): Fraction(1)}
        for _ in range(5): law = {(*y, k): w * Fraction(k + 1, 6) for y, w in law.items() for k in range(3)}
    return process_time() - start


def pytest_collection_modifyitems(items):
    "In the long profile a test that states its number of examples runs forty times as many"
    name = "_hypothesis_internal_use_settings"
    for test in {item.obj for item in items if PROFILE == "long" and hasattr(item.obj, name)}:
        own = getattr(test, name)
        if own.max_examples < 1000: setattr(test, name, settings(own, max_examples=40*own.max_examples))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.start = used()
    result = yield
    if used() > EVERY*(1 + len(YARDSTICKS)): YARDSTICKS.append(yardstick())
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    now = used()
    report.cpu, item.start = now - item.start, now
    return report


def pytest_runtest_logreport(report): SPENT[report.nodeid] += report.cpu


def pytest_testnodedown(node):
    WORKERS.append(node.workeroutput["cpu"])
    YARDSTICKS.extend(node.workeroutput["yardsticks"])


def pytest_sessionfinish(session):
    """A worker reports its CPU seconds and its yardsticks, which were taken while the others ran: they share
    memory, caches and clock. The controller adds them up, and a whole suite above the budget fails"""
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput |= dict(cpu=used(), yardsticks=YARDSTICKS)
        return
    notebooks = [seconds for name, seconds in SPENT.items() if "test_runs_as_stored" in name]
    total, unit = sum(WORKERS) or used(), np.mean(YARDSTICKS or [yardstick()])
    scaled = total * REFERENCE / unit
    session.config.bill = [*bill(notebooks), f"{total:8.1f}  in all, at {unit:.3f} a yardstick",
                           f"{scaled:8.1f}  on the reference machine (budget {BUDGET})"]
    if len(notebooks) >= WHOLE and scaled > BUDGET: session.exitstatus = pytest.ExitCode.TESTS_FAILED


def bill(notebooks):
    "The tests that take most, and the notebooks' mean"
    lines = [f"{seconds:8.1f}  {name}" for name, seconds in SPENT.most_common(10)]
    if notebooks:
        most = f"{len(notebooks)} notebooks, {max(notebooks):.1f} at most"
        lines.append(f"{np.mean(notebooks):8.1f}  mean of {most}")
    return lines


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("CPU seconds")
    for line in config.bill: terminalreporter.line(line)
