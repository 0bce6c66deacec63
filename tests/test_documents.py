"""What documents show: commands are run, their output is compared, and code blocks are executed."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from asyncpp_cli.main import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TUTORIAL = ROOT / "docs" / "tutorial.md"
"""Its commands build on each other, and have a test of their own."""
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS if document != TUTORIAL]

NOT_RUN = {
    "quickstart": "trains for minutes; tests of launch do the same with fewer steps",
    "launch": "trains",
    "tune": "trains; tests/asyncpp_cli/tune does the same with fewer steps",
    "logs": "follows a run that trains, or needs one that did",
    "cancel": "needs a run that trains",
    "doctor": "starts processes, or needs a cluster",
    "export": "needs a run that trained",
    "mirror": "needs a tracker's package",
    "sweep --profile": "needs the files that it measured; tests/*/test_profile.py",
    "report --watch": "ends when the runs have",
    "plan": "searches for half a minute; tests/*/test_plan.py",
    "data": "needs a tokenizer's file, or data that it made",
    "schedule draw": "the test of pictures does",
    "schedule export quickstart/2bw-muon-ef0-nano-s0": "needs a run that trained",
}
"""Commands that documents show and this test does not run, and why; the parser sees them all (test_house)."""


def fences(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(document: Path) -> list[str]:
    """The commands of a document's shell blocks, in order."""
    text = re.sub(r"\\\n\s*", " ", document.read_text(encoding="utf-8"))
    shell = re.findall(r"```sh\n(.*?)```|^    (asyncpp [^\n]*)$", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block, indented in shell for line in (block or indented).splitlines()]
    parts = [
        part for line in lines for part in line.partition("#")[0].partition(" > ")[0].strip().split(" && ")
    ]
    return [part for part in parts if part.startswith("asyncpp ") and "[--" not in part]


def is_left_out(command: str) -> bool:
    words = command.split()[1:]
    return any(set(reason.split()) <= set(words) and words[0] == reason.split()[0] for reason in NOT_RUN)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the documents' commands are given: a template, text, and experiments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCPP_CACHE", str(cache))
    (tmp_path / "my-text").write_text("To be, or not to be, that is the question. " * 500, encoding="utf-8")
    [template] = fences(ROOT / "README.md", "yaml")
    (tmp_path / "mine.yaml").write_text(template, encoding="utf-8")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if commands(ROOT / name)])
def test_commands_of_a_document_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [command for command in commands(ROOT / name) if not is_left_out(command)]
    for experiment in ("DIR", "mine"):
        used = any(experiment in command.split() for command in wanted)
        if used and not any(command.endswith(f"--out {experiment}") for command in wanted):
            assert run(f"asyncpp sweep quickstart --out {experiment}", monkeypatch) == 0
    assert [command for command in wanted if run(command, monkeypatch) != 0] == []


def test_every_reason_not_to_run_a_command_is_still_needed() -> None:
    shown = [command.split()[1:] for document in DOCUMENTS for command in commands(document)]
    needed = {name for name in NOT_RUN if any(set(name.split()) <= set(words) for words in shown)}
    assert needed == set(NOT_RUN)


def typed(document: Path) -> list[tuple[str, str]]:
    """Commands typed at a `$`, with the output that the document shows."""
    blocks = [block.removeprefix("$ ") for block in fences(document, "") if block.startswith("$ ")]
    return [(block.partition("\n")[0], block.partition("\n")[2]) for block in blocks]


def assert_shown(printed: str, shown: str) -> None:
    """What a command printed is what the document shows; a last line `...` stands for the rest."""
    printed_lines, shown_lines = ([line.rstrip() for line in text.splitlines()] for text in (printed, shown))
    if shown_lines[-1:] == ["..."]:
        shown_lines.pop()
        del printed_lines[len(shown_lines) :]
    assert printed_lines == shown_lines


@pytest.mark.parametrize(
    ("name", "command", "output"), [(name, *pair) for name in NAMES for pair in typed(ROOT / name)]
)
def test_shown_output_is_what_the_command_prints(
    name: str,
    command: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command, monkeypatch) == 0
    assert_shown(capsys.readouterr().out, output)


@pytest.mark.slow
def test_tutorial_runs_as_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    for block in [*fences(TUTORIAL, "python"), *fences(TUTORIAL, "yaml")]:
        Path(block.split()[1]).write_text(block, encoding="utf-8")
    for command, output in typed(TUTORIAL):
        assert run(command, monkeypatch) == 0
        assert_shown(capsys.readouterr().out, output)
    for command in commands(TUTORIAL):
        assert run(command, monkeypatch) == 0
    capsys.readouterr()
    assert run("asyncpp report tried --format json", monkeypatch) == 0
    cells = json.loads(capsys.readouterr().out)
    assert {cell["status"] for cell in cells} == {"completed"}
    assert len({cell["val_loss"] for cell in cells}) == 1


def drawings() -> list[str]:
    return sorted({c for document in DOCUMENTS for c in commands(document) if " schedule draw " in c})


@pytest.mark.slow
@pytest.mark.parametrize("command", drawings())
def test_pictures_are_what_their_command_draws(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    out = Path(command.split()[-1])
    kept = (ROOT / "docs" / "images" / out.name).read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}" not in kept:
        pytest.skip("drawn by another version of matplotlib")
    assert run(command, monkeypatch) == 0
    assert out.read_text(encoding="utf-8") == kept, "run: make docs"


def test_make_docs_draws_every_picture() -> None:
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [
        c for c in drawings() if c.replace("--out docs/images/", "--out ").split(" --out ")[0] not in made
    ] == []


def templates() -> list[tuple[str, str]]:
    blocks = [(name, block) for name in NAMES for block in fences(ROOT / name, "yaml")]
    own = [(name, block, set(yaml.safe_load(block))) for name, block in blocks]
    return [(name, block) for name, block, keys in own if "matrix" in keys and keys & {"model", "base"}]


@pytest.mark.parametrize(("name", "template"), templates())
def test_templates_in_documents_can_be_swept(
    name: str, template: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("shown.yaml").write_text(template, encoding="utf-8")
    assert run("asyncpp sweep shown.yaml --list", monkeypatch) == 0


def printed_strings() -> str:
    """All texts in our code, each on a line, with `...` where a value is put in."""
    texts = []
    for package in ("asyncpp", "asyncpp_cli", "stages", "schedules", "optimizers"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    texts.append("".join(map(str, parts)))
    return "\n".join(texts)


def test_messages_quoted_under_troubleshooting_are_printed_by_the_code() -> None:
    code = printed_strings()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'"([^"]+)"', page)
    assert len(quoted) > 10
    assert [m for m in quoted if not all(part.strip() in code for part in m.split("..."))] == []


@pytest.mark.slow
def test_python_of_the_api_page_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("asyncpp sweep quickstart --out DIR", monkeypatch) == 0
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for block in fences(ROOT / "docs" / "api.md", "python"):
        exec(compile(block, "api.md", "exec"), {"__name__": "api"})


def test_public_names_of_the_api_page_exist() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for dotted in re.findall(r"`((?:schedules|optimizers|stages)[\w.]*)`", page):
        module, _, attribute = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), dotted


def test_the_site_opens_from_a_folder_and_answers_first() -> None:
    """Search needs no server and no network, and the first page has the picture, the answer and the start."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "offline" in settings["plugins"]
    # Otherwise the plugin adds its script by an address in the network.
    [script] = settings["extra"]["polyfills"]
    assert "iframe-worker" in script
    assert (ROOT / "docs" / script).is_file()
    first = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("**Run experiments**")[0]
    for part in ("images/1f1b-vs-2bw.svg", "**The answer so far**", "pip install .\nasyncpp quickstart"):
        assert part in first
    assert "**What it has run on:**" in (ROOT / "README.md").read_text(encoding="utf-8").partition("## ")[0]
