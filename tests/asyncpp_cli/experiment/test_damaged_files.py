"""Whatever a file of an experiment holds: `sweep` ends with exit code 0, or 2 and one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import Ended, asyncpp, succeeded

from asyncpp_cli.base.errors import DamagedError
from asyncpp_cli.runs.config_file import read_config
from asyncpp_cli.runs.experiment_folder import EXPERIMENT_FILE, open_experiment

TEMPLATE = b"""\
name: small
matrix: {schedule: [1f1b, 2bw], optimizer: adamw, seed: [0, 1]}
exclude: [{schedule: 1f1b, seed: 1}]
overrides: [{when: {schedule: 2bw}, set: {optimizer.lr: 1e-3}}]
model: micro
schedule.microbatches: 2
train: {steps: 3, clip: none}
"""

ODD = ["", "[", "{", ": ", "'", "\n", "\t", "!!int ", "null", "9" * 5000]
ODD += ["1e400", ".nan", "\x00", "\ufeff", "a" * 300, "[" * 3000, "{a: " * 500, "../", "2001-99-99"]


def one_line(ended: Ended) -> None:
    assert ended.code in (0, 2), ended
    if ended.code == 2:
        assert ended.output == ""
        assert ended.errors.count("\n") == 1, ended.errors
        assert ended.errors.startswith("asyncpp: error: ")
        assert "\x1b" not in ended.errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "template.yaml").write_bytes(TEMPLATE)
    succeeded("sweep", folder / "template.yaml", "--out", folder / "e")
    return folder


@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_any_damage_to_an_experiment_is_restored_or_refused(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "e", ignore_errors=True)
    folder = Path(shutil.copytree(whole / "e", tmp_path / "e"))
    run, *others = open_experiment(folder).runs
    names = (
        EXPERIMENT_FILE,
        "template.yaml",
        "resolved.yaml",
        f"runs/{run.id}/config.yaml",
        f"runs/{run.id}/status.json",
    )
    file = folder / data.draw(st.sampled_from(names))
    before = file.read_bytes() if file.exists() else b'{"format": 1, "state": "pending"}'
    match data.draw(st.sampled_from(["bytes", "gone", "folder", "link"])):
        case "bytes":
            place, length = data.draw(st.integers(0, len(before))), data.draw(st.sampled_from([0, 1, 8]))
            odd = data.draw(st.sampled_from(ODD).map(str.encode) | st.binary(max_size=4))
            file.write_bytes(before[:place] + odd + before[place + length :])
        case "gone":
            file.unlink(missing_ok=True)
        case "folder":
            file.unlink(missing_ok=True)
            file.mkdir()
        case "link":
            file.unlink(missing_ok=True)
            file.symlink_to(file.name)
    ended = asyncpp("sweep", whole / "template.yaml", "--out", folder)
    one_line(ended)
    for other in others:
        assert (
            other.config_file.read_bytes() == (whole / "e" / "runs" / other.id / "config.yaml").read_bytes()
        )
    if ended.code == 0 and file == run.config_file:
        assert run.config()


def test_an_unknown_section_of_a_runs_configuration_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(":schedule:\n  name: 1f1b\n")
    with pytest.raises(DamagedError, match=r":schedule\.name"):
        read_config(file)
