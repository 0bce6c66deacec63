"""Scores an exported model with lm-evaluation-harness, in a process of its own.

python -m asyncpp_cli.scoring.harness REQUEST ANSWER    both JSON: `Request`, `Answer`
"""

from __future__ import annotations

import difflib
import hashlib
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stages.config.records import Count, FileRecord, Record, encoded, read_record


class Request(FileRecord, frozen=True, kw_only=True):
    """What is to be scored."""

    model: str
    """Folder of an export."""
    tokenizer: str | None
    """Folder of its tokenizer; None: it is in the export."""
    tasks: list[str]
    """Names of tasks and groups, and YAML files of tasks."""
    include: str | None
    """Folder with further tasks as YAML files."""
    device: str
    batch_size: Count
    limit: float | None
    shots: Count | None


class TaskScore(Record, frozen=True, kw_only=True):
    """Fields as in `runs.scores.Score`."""

    asked: str
    task: str
    metrics: dict[str, float]
    errors: dict[str, float]
    samples: Count
    content_sha256: str


class Answer(FileRecord, frozen=True, kw_only=True):
    """The scores, or the problem that prevents them."""

    problem: str = ""
    harness: str = ""
    scores: tuple[TaskScore, ...] = ()


class _ProblemError(Exception):
    """What the user has to change, in one line."""


def score(request: Request) -> Answer:
    """Score a model.

    Raises:
        _ProblemError: a task is unknown, or its data cannot be had.
    """
    from lm_eval import simple_evaluate

    manager, loaded = _loaded(request)
    names = {asked: _names_of(tasks) for asked, tasks in loaded.items()}
    results: dict[str, Any] = simple_evaluate(
        model="hf",
        model_args={"pretrained": request.model, "tokenizer": request.tokenizer, "dtype": "float32"},
        tasks=request.tasks,
        task_manager=manager,
        num_fewshot=request.shots,
        batch_size=request.batch_size,
        device=request.device,
        limit=request.limit,
    )
    scores = [
        _score_of(name, asked, results)
        for asked, among in names.items()
        for name in among
        if name in results["results"]
    ]
    return Answer(harness=version("lm_eval"), scores=tuple(scores))


def _loaded(request: Request) -> tuple[Any, dict[str, Any]]:
    """The manager that knows all tasks, and what each name loads."""
    from lm_eval.tasks import TaskManager

    # The harness's own tasks are 14,000 files, which take long to list.
    own = TaskManager(include_path=request.include, include_defaults=False)
    local = {name for name in request.tasks if name in own.task_index or Path(name).is_file()}
    manager = own if local == {*request.tasks} else TaskManager(include_path=request.include)
    known = manager.task_index
    for name in request.tasks:
        if name not in known and name not in local:
            close = difflib.get_close_matches(name, known, n=3)
            hint = (
                f"did you mean {', '.join(close)}?"
                if close
                else "accepted: a task of lm_eval (lm_eval ls tasks)"
            )
            raise _ProblemError(f"task {name} is unknown; {hint}, of --include DIR, or a YAML file")
    loaded = {}
    for name in request.tasks:
        try:
            loaded[name] = manager.load([name])
        except Exception as error:
            raise _ProblemError(f"task {name} {_why_not(error)}") from error
    return manager, loaded


def _names_of(loaded: dict[str, Any]) -> list[str]:
    """The results that stand for what was asked: of a group its own, else of each task."""
    if not loaded["groups"]:
        return [*loaded["tasks"]]
    within = {child for children in loaded["group_map"].values() for child in children}
    outer = [name for name in loaded["groups"] if name not in within]
    return [name for group in outer for name in (group, *loaded["group_map"][group])]


def _score_of(name: str, asked: str, results: dict[str, Any]) -> TaskScore:
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in results["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        into = errors if metric.endswith("_stderr") else metrics
        suffix = "" if filtered == "none" else f",{filtered}"
        into[metric.removesuffix("_stderr") + suffix] = float(value)
    samples = results.get("samples", {}).get(name, [])
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample['doc_hash']}{sample['prompt_hash']}{sample['target_hash']}".encode())
    asked_of = results.get("n-samples", {}).get(name, {}).get("effective", len(samples))
    return TaskScore(
        asked=asked,
        task=name,
        metrics=metrics,
        errors=errors,
        samples=int(asked_of),
        content_sha256=digest.hexdigest() if samples else "",
    )


_HUB_WORDS = ("hub", "hugging face", "huggingface", "offline mode", "is not cached")


def _why_not(error: BaseException) -> str:
    """Why a task cannot be loaded, in words for people."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    said = " ".join(str(chain[0]).split())[:200]
    if any(isinstance(each, ConnectionError) for each in chain) or any(
        word in str(each).lower() for each in chain for word in _HUB_WORDS
    ):
        return (
            f"needs data from the Hugging Face hub, which cannot be had here ({said}); accepted: a task "
            "whose data is in local files, or a cache of the hub that was filled elsewhere (HF_HOME)"
        )
    return f"cannot be loaded ({type(error).__name__}: {said})"


def main() -> None:
    request, answer = (Path(argument) for argument in sys.argv[1:])
    try:
        found = score(read_record(request, Request))
    except _ProblemError as problem:
        found = Answer(problem=str(problem))
    answer.write_bytes(encoded(found))


if __name__ == "__main__":
    main()
