"""Settings of the suite: random seed, hypothesis, markers, and the distribution of tests over workers."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SEED = "ASYNCPP_TEST_SEED"
"""Environment variable with the seed of an earlier session, to repeat it."""

UNMARKED = "ASYNCPP_TEST_UNMARKED"
"""Environment variable: list the tests that should be marked slow."""

# More threads of torch's compiler are processes that import torch first: longer than the kernels here take.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# On a busy machine any example may be slow.
settings.register_profile("untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell starts jobs behind `&` with SIGINT ignored, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the session's seed. Workers inherit it, and hypothesis draws its examples from it."""
    seed = os.environ.setdefault(SEED, str(random.SystemRandom().randrange(2**32)))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed


def without_surrogates(value: Any) -> Any:
    """A report's data with lone surrogates, as in undecodable file names, replaced by their escapes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_surrogates(item) for item in value)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Under `pytest -n`, a worker sends its reports as UTF-8, which has no lone surrogates."""
    return without_surrogates((yield))


MARKED = {
    "slow": "-m slow",
    "slurm": "-m slurm, with SLURM (tests/cluster/cluster install)",
    "gpu": "-m gpu, where torch finds a GPU",
    "browser": "-m browser, with Chromium (apt-get install chromium)",
}
"""How to run the tests of each marker."""
left_out: Counter[str] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    left_out.update(name for item in items for name in MARKED if item.get_closest_marker(name))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under `pytest -n` workers collect, and the first process says what was left out."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Keep the processor seconds of tests without a marker, of ended child processes too."""
    begun = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        if UNMARKED in os.environ and not any(map(item.get_closest_marker, MARKED)):
            item.user_properties.append((UNMARKED, sum(os.times()[:4]) - begun))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in left_out.items():
        terminalreporter.write_line(
            f"Not run, marked {name}: {count}. To run: python -m pytest {MARKED[name]}"
        )
    # A list for people: on a slower machine the same test takes more, and none may fail for that.
    for report in terminalreporter.stats.get("passed", []):
        if (seconds := dict(report.user_properties).get(UNMARKED, 0.0)) > 1:
            terminalreporter.write_line(f"Mark as slow: {report.nodeid}: {seconds:.1f} s of processor time")
    if terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.write_line(f"To repeat the random choices: {SEED}={os.environ[SEED]}")


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers from the session's seed and the test's name."""
    return random.Random(f"{os.environ[SEED]} {request.node.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of data and plans is kept in a folder of the session, not in that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASYNCPP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
HANDLERS = {number: signal.getsignal(number) for number in HANDLED}
"""Those of the session's start."""


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a test or a fixture, or a command run by them, replaced."""
    _restore_handlers()
    yield
    _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_process_group() -> Iterator[None]:
    """Destroy the group of a model in shards, which stays in a process: transformers saves on rank 0."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized() and distributed.get_backend() == "silent":
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules imported from temporary folders: the next test may write others of the same names."""
    yield
    temporary = f"{tmp_path_factory.getbasetemp()}{os.sep}"
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(temporary):
            del sys.modules[name]
    if custom := sys.modules.get("optimizers.custom"):
        for member in vars(custom).values():
            if isinstance(member, functools._lru_cache_wrapper):
                member.cache_clear()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `pytest -n`, a file's tests run on one worker, as do all tests of the SLURM cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cluster" if "tests/cluster/" in file else file

    return ByFile(config, log)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Hide what is imported by now from the garbage collector: a fifth of the tests' time went into it."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the cluster, and order the files so that no long one is left for the end.

    First the files that mostly wait, of the cluster and of launches, then those with most slow tests.
    """
    for item in items:
        if item.path.parent.name == "cluster":
            item.add_marker(pytest.mark.slurm)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    waiting = ("cluster", "launch")
    items.sort(key=lambda item: (*(item.path.parent.name != name for name in waiting), -slow[item.path]))
