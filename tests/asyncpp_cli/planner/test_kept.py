"""Facts that plans keep on disk: they are those that are found without, and a file is no more than a help."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from support.planned import COSTS, layout_of

import schedules
from asyncpp_cli.planner import cuts, planned_memory, representative
from asyncpp_cli.planner import kept as kept_module
from asyncpp_cli.planner.decision import decision_map
from asyncpp_cli.planner.estimate import own_estimate
from asyncpp_cli.planner.kept import keeping, kept
from asyncpp_cli.planner.planned_memory import message_sizes
from asyncpp_cli.planner.representative import Shape, least_lead, messages, represented, steady_span, traits
from asyncpp_cli.planner.stage_times import own_cut_of
from stages.config.run_config import RunConfig, changed


class Square(NamedTuple):
    of: float
    result: float


def squares() -> tuple[Callable[[float], Square], list[float]]:
    """A function as a process has it that has just begun, and what it has computed."""
    computed: list[float] = []

    def square(of: float) -> Square:
        computed.append(of)
        return Square(of, of * of)

    square.__annotations__ = {"return": Square}
    return kept(square), computed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("ASYNCPP_CACHE", str(cache))
    return cache


def computed_by_another_process(*given: float) -> list[float]:
    """What of these is computed once more, each with a right result."""
    square, computed = squares()
    with keeping():
        for each in given:
            assert square(each) == Square(each, each * each)
    return computed


def test_what_a_process_has_found_another_reads(folder: Path) -> None:
    assert computed_by_another_process(0.1, 3.0) == [0.1, 3.0]
    [file] = folder.iterdir()
    before = file.read_bytes()
    assert computed_by_another_process(3.0, 0.1, 0.1) == []
    assert file.read_bytes() == before
    assert computed_by_another_process(3.0, 4.0) == [4.0]
    assert computed_by_another_process(0.1, 3.0, 4.0) == []


def test_outside_of_a_plan_nothing_is_kept(folder: Path) -> None:
    square, computed = squares()
    assert square(3.0) == square(3.0)
    assert computed == [3.0]
    assert not folder.exists()


def test_what_was_found_before_an_interruption_is_kept() -> None:
    square, _ = squares()

    @keeping()
    def interrupted() -> None:
        square(3.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert computed_by_another_process(3.0) == []


def test_of_two_plans_at_a_time_the_later_one_adds_to_what_the_other_wrote() -> None:
    square, _ = squares()
    with keeping():
        square(3.0)
        own, kept_module._open[:] = kept_module._open[:], []  # the other process
        assert computed_by_another_process(4.0) == [4.0]
        kept_module._open[:] = own
    assert computed_by_another_process(3.0, 4.0) == []


def test_a_damaged_file_counts_as_none(folder: Path) -> None:
    computed_by_another_process(3.0)
    [file] = folder.iterdir()
    whole = file.read_bytes()
    of_another_type = kept_module._DIGEST(b"\x01").digest() + b"\x01"
    flipped = bytes([*whole[:-1], whole[-1] ^ 1])
    for damaged in (b"", whole[:20], whole[:-1], flipped, b"text", of_another_type):
        file.write_bytes(damaged)
        assert computed_by_another_process(3.0) == [3.0]
        assert file.read_bytes() == whole


def test_a_fact_of_another_type_is_computed_again(folder: Path) -> None:
    computed_by_another_process(3.0)
    [file] = folder.iterdir()
    facts = kept_module._Facts(file)
    facts.new = dict.fromkeys(facts.known, b"\xa4text")
    facts.write()
    assert computed_by_another_process(3.0) == [3.0]
    assert computed_by_another_process(3.0) == []


@pytest.mark.parametrize("where", ["file", "file/below", "unwritable"])
def test_without_a_folder_that_can_be_written_a_plan_keeps_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "unwritable").mkdir(mode=0o500)
    monkeypatch.setenv("ASYNCPP_CACHE", str(tmp_path / where))
    assert computed_by_another_process(3.0) == [3.0]
    as_root = where == "unwritable" and os.geteuid() == 0
    assert computed_by_another_process(3.0) == ([] if as_root else [3.0])


def test_facts_that_were_found_first_go_where_a_file_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    computed_by_another_process(1.0, 2.0, 3.0)
    size = len(kept_module.msgspec.msgpack.encode(Square(1.0, 1.0)))
    monkeypatch.setattr(kept_module, "LARGEST", 3 * size)
    assert computed_by_another_process(4.0) == [4.0]
    assert computed_by_another_process(2.0, 3.0, 4.0, 1.0) == [1.0]


def test_other_code_finds_its_own_facts_and_old_files_go(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "part").mkdir(parents=True)
    (package / "part" / "module.py").write_text("answer = 41")
    before = kept_module._version_of([package])
    assert kept_module._version_of([package]) == before
    (package / "part" / "module.py").write_text("answer = 42")
    assert kept_module._version_of([package]) != before
    for version in map(str, range(kept_module.VERSIONS + 2)):
        monkeypatch.setattr(kept_module, "_version_of", lambda packages, version=version: version)
        assert computed_by_another_process(3.0) == [3.0]
        os.utime(folder / f"plans-{version}.facts", (int(version), int(version)))
    (folder / "data of a run").touch()
    names = {file.name for file in folder.iterdir()}
    assert "data of a run" in names
    assert names >= {f"plans-{version}.facts" for version in range(3, kept_module.VERSIONS + 2)}
    assert len(names) == kept_module.VERSIONS + 1


KEPT = (
    *("represented", "_messages", "_sends_in_flight", "traits", "least_lead"),
    *("seconds_of_step", "_flow"),
)
OTHER_COSTS = replace(COSTS, device=replace(COSTS.device, tflops={"bfloat16": 500.0, "float32": 300.0}))


def facts_of(config: RunConfig) -> list[Any]:
    """All kinds of facts that a plan keeps."""
    shape = Shape.of(config)
    return [
        represented(shape),
        messages(shape, message_sizes(config)),
        traits(shape.name),
        least_lead(shape.name, stages=shape.stages, shard_head=shape.shard_head),
        None if schedules.is_synchronous(shape.name) else steady_span(shape),
        own_estimate(config, COSTS).step,
        own_cut_of(config),
    ]


def test_facts_of_programs_are_the_same_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [
        layout_of("134m", "2bw", stages=4, microbatches=16, shard_head=True),
        layout_of("134m", "2bw-v", stages=2, microbatches=8, chunks=2),
        layout_of("134m", "zb-v", stages=2, microbatches=8, chunks=2),
        layout_of("134m", "1f1b", stages=4, microbatches=8, shard_head=True),
        layout_of("134m", "paci", stages=4, microbatches=8),
    ]

    def forget() -> None:
        for name in KEPT:
            cast(Any, getattr(representative, name)).cache_clear()

    forget()
    computed = [facts_of(config) for config in configs]
    faster = [own_estimate(config, OTHER_COSTS).step for config in configs]
    forget()
    with keeping():
        assert [facts_of(config) for config in configs] == computed
    forget()
    monkeypatch.setattr(representative, "_built", None)
    with keeping():
        assert [facts_of(config) for config in configs] == computed
        # The programs of before, under other times.
        assert [own_estimate(config, OTHER_COSTS).step for config in configs] == faster


def test_what_code_of_the_user_decides_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_for(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(planned_memory, "_kept", looked_for)
    monkeypatch.setattr(cuts, "_kept", looked_for)
    own, ours = (layout_of("134m", "2bw", stages=4, microbatches=32) for _ in range(2))
    own = changed(own, {"optimizer.name": "torch.optim:SGD"})
    # Of settings that no other test has looked at in this process.
    own = changed(own, {"train.microbatch_size": 3})
    ours = changed(ours, {"train.microbatch_size": 3})
    assert cuts.cuts_to_try(own, COSTS, limit_gb=70.0)
    assert cuts._fitting_cuts(own, COSTS, limit_gb=70.0)
    with pytest.raises(LookupError):
        cuts.cuts_to_try(ours, COSTS, limit_gb=70.0)
    with pytest.raises(LookupError):
        cuts._fitting_cuts(ours, COSTS, limit_gb=70.0)


def test_the_processes_of_a_map_keep_facts(folder: Path) -> None:
    base = layout_of("134m", "1f1b", stages=1, microbatches=1)
    settings = {"gpus": 4, "tokens_per_step": [2**15], "costs": COSTS, "limit_gb": 80.0}
    points = decision_map(base, **settings, processes=2)
    [file] = folder.iterdir()
    before = kept_module._read(file)
    assert before
    assert decision_map(base, **settings) == points
    # Of two processes that end at a time one may have lost what it found.
    assert kept_module._read(file).items() >= before.items()
