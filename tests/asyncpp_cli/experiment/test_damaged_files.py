"""Whatever a template or a file of an experiment holds: `sweep` ends with exit code 0, or 2 and one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command_line import Ended, asyncpp

from asyncpp_cli.errors import DamagedError
from asyncpp_cli.experiment.config_file import read_config
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

ODD = [
    *(
        "",
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        "- ",
        ",",
        "'",
        '"',
        "\n",
        "\t",
        "\\",
        "#",
        "&a ",
        "*a",
        "!!int ",
        "? ",
    ),
    *(
        "|",
        ">",
        "%",
        "@",
        "`",
        "~",
        "null",
        "true",
        "???",
        "${a}",
        "${oc.env:HOME}",
        "<<: ",
        "---\n",
        "...\n",
    ),
    *("-1", "0", "017", "1:30", "1e400", ".nan", ".inf", "9" * 5000, "0x" + "f" * 40, "2001-99-99", "1_0"),
    *("\x00", "\x1b", "\ufeff", "\u2028", "\ud7ff", "[" * 3000, "{a: " * 500, "a" * 300, "../", "/", "%j"),
]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A few bytes of it replaced by something odd."""
    content = whole
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 0, 1, 2, 8, len(content)]))
        odd = draw(st.sampled_from(ODD).map(str.encode) | st.binary(max_size=4))
        content = content[:place] + odd + content[place + length :]
    return content


def one_line(ended: Ended) -> None:
    assert ended.code in (0, 2), ended
    if ended.code == 2:
        assert ended.output == ""
        assert ended.errors.count("\n") == 1, ended.errors
        assert ended.errors.startswith("asyncpp: error: ")
        assert "\x1b" not in ended.errors


fuzzed = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(content=damaged(TEMPLATE))
@fuzzed
@pytest.mark.slow
def test_any_template_is_swept_or_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "template.yaml"
    file.write_bytes(content)
    one_line(asyncpp("sweep", file, "--list"))


@given(
    key=st.sampled_from(
        ["seed", "train.steps", "optimizer.lr", "data.path", "matrix.seed", "zip", "overrides"]
    ),
    value=damaged(b"[0, 1]").filter(lambda value: b"\0" not in value),
)
@fuzzed
@pytest.mark.slow
def test_any_change_is_swept_or_refused(tmp_path: Path, key: str, value: bytes) -> None:
    file = tmp_path / "template.yaml"
    file.write_bytes(TEMPLATE)
    one_line(asyncpp("sweep", file, f"{key}={value.decode(errors='replace')}", "--list"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "template.yaml").write_bytes(TEMPLATE)
    assert asyncpp("sweep", folder / "template.yaml", "--out", folder / "e").code == 0
    return folder


@given(data=st.data())
@settings(fuzzed, max_examples=15)
@pytest.mark.slow
def test_any_damage_to_an_experiment_is_restored_or_refused(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    shutil.rmtree(tmp_path / "e", ignore_errors=True)
    folder = Path(shutil.copytree(whole / "e", tmp_path / "e"))
    run, *others = open_experiment(folder).runs
    names = (EXPERIMENT_FILE, "template.yaml", f"runs/{run.id}/config.yaml", f"runs/{run.id}/status.json")
    file = folder / data.draw(st.sampled_from(names))
    before = file.read_bytes() if file.exists() else b'{"format": 1, "state": "pending"}'
    match data.draw(st.sampled_from(["bytes", "gone", "folder", "link"])):
        case "bytes":
            file.write_bytes(data.draw(damaged(before)))
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
