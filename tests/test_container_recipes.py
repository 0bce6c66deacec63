"""The recipes in containers/: what they install, and what they must not contain."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.command_line import ran
from support.files import write_program

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
DEFINITION = (FOLDER / "asyncpp.def").read_text()


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their words, comments and continuations resolved."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, " ".join(words.split())) for name, _, words in pairs]


def sections() -> dict[str, str]:
    """The definition's sections by name; its header has the empty name."""
    parts = re.split(r"^%(\w+)\n", DEFINITION, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_linter_of_dockerfiles_has_no_remark() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    ended = ran(hadolint, FOLDER / "Dockerfile")
    assert (ended.code, ended.output) == (0, "")


def test_both_have_the_same_base_of_one_exact_version() -> None:
    [base] = re.findall(r"^ARG BASE=docker.io/library/(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert f"Bootstrap: docker\nFrom: {base}\n" in sections()[""]


def test_the_last_user_is_not_root() -> None:
    users = [words for name, words in instructions() if name == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")


def test_only_named_parts_of_the_checkout_are_copied_and_both_copy_the_same() -> None:
    copied = {source for name, words in instructions() if name == "COPY" for source in words.split()[:-1]}
    assert copied == {line.split()[0] for line in sections()["files"].splitlines() if line.strip()}
    packages = {"asyncpp", "asyncpp_cli", "stages", "schedules", "optimizers", "templates"}
    assert packages <= copied
    assert all((ROOT / source).exists() for source in copied)
    assert "." not in copied
    assert not [name for name, _ in instructions() if name == "ADD"]


def test_they_hold_no_secrets() -> None:
    for text in (DOCKERFILE, DEFINITION, (FOLDER / "install.sh").read_text()):
        assert not re.search(r"(?i)(token|secret|passw|api_?key|netrc|\.ssh|//[^/\s]*@)", text)


def test_labels_and_build_arguments() -> None:
    labels = " ".join(words for name, words in instructions() if name == "LABEL")
    for label in ("title", "licenses", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
        assert f"org.opencontainers.image.{label} " in sections()["labels"]
    arguments = {words.partition("=")[0] for name, words in instructions() if name == "ARG"} - {"BASE"}
    assert arguments == {
        line.strip().partition("=")[0] for line in sections()["arguments"].split("\n") if line
    }
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION)) == arguments


def test_the_installer_names_the_devices_that_it_accepts() -> None:
    assert ran("sh", "-n", FOLDER / "install.sh").code == 0
    ended = ran("sh", FOLDER / "install.sh", ROOT, "/nonexistent", "tpu")
    assert (ended.code, ended.errors) == (2, "DEVICE is 'tpu'; accepted: cpu, cuda\n")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_image_for_gpus_has_what_nccl_needs_for_infiniband(device: str, tmp_path: Path) -> None:
    """Without these libraries NCCL uses TCP. The installer's commands are recorded, none of them runs."""
    for name in ("apt-get", "rm", "python3"):
        write_program(tmp_path / name, f'echo {name} "$@" >> {tmp_path}/ran', f"[ {name} != python3 ]")
    ran("/bin/sh", FOLDER / "install.sh", ROOT, tmp_path / "target", device, env={"PATH": str(tmp_path)})
    said = (tmp_path / "ran").read_text()
    for package in ("libibverbs1", "ibverbs-providers", "librdmacm1"):
        assert (package in said) == (device == "cuda")
