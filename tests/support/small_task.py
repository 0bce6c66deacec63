"""A task of lm-evaluation-harness whose data is in local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTIONS: list[dict[str, Any]] = [
    {"begin": f"def f{number}", "ends": ["(x):\n", " = 3", "zzz zz"], "right": number % 3}
    for number in range(7)
]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_target: "{{{{right}}}}"
doc_to_choice: "{{{{ends}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
  - {{metric: brier_score, aggregation: brier_score, higher_is_better: false}}
metadata: {{version: 1}}
"""


def write_task(folder: Path, *, name: str = "small_choice") -> Path:
    """Write the task with its data; returns its YAML file."""
    folder.mkdir(exist_ok=True)
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    file = folder / f"{name}.yaml"
    file.write_text(TASK.format(name=name, data=data))
    return file


def right_answers(model: Any) -> dict[str, float]:
    """Its scores with a model of transformers over bytes, without the harness: a choice has the sum of the
    log-probabilities of its tokens, for `acc_norm` divided by its length. The Brier score is the mean square
    by which the choices' probabilities miss the right one."""
    import torch

    right = {"acc": 0.0, "acc_norm": 0.0, "brier_score": 0.0}
    for question in QUESTIONS:
        sums = []
        for end in question["ends"]:
            text, begin = (question["begin"] + end).encode(), len(question["begin"])
            tokens = torch.tensor([list(text)])
            with torch.no_grad():
                logs = model(tokens).logits[0].double().log_softmax(-1)
            sums.append(sum(float(logs[place - 1, text[place]]) for place in range(begin, len(text))))
        by_length = [total / len(end) for total, end in zip(sums, question["ends"], strict=True)]
        chances = torch.tensor(sums, dtype=torch.float64).softmax(0).tolist()
        right["brier_score"] += sum(
            (chance - (place == question["right"])) ** 2 for place, chance in enumerate(chances)
        )
        right["acc"] += max(range(3), key=sums.__getitem__) == question["right"]
        right["acc_norm"] += max(range(3), key=by_length.__getitem__) == question["right"]
    return {metric: count / len(QUESTIONS) for metric, count in right.items()}
