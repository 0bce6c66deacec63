"""The rows of a run's metrics: what the trainer writes, one JSON object per line, and every reader reads.

docs/run-folder.md describes their fields. Rows of earlier versions lack some: those are None here. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import msgspec

Numbers = list[float | None]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, as large as a column of a data frame holds."""

WRITTEN_AS_NULL = {
    "commit",
    "bytes_per_token",
    "unigram_bits_per_byte",
    "val_loss_error",
    "train_loss",
    "lr",
    "grad_norm",
}
"""Fields that a row has always had, also where nothing is known; scripts read them by their key."""


class RowError(ValueError):
    """A row lacks a field of its kind, or has a value of another type in it."""


class Row(msgspec.Struct, kw_only=True, frozen=True, tag_field="kind", gc=False):
    """A line of the metrics; `kind` is the tag of its class."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    def plain(self) -> dict[str, Any]:
        """The row as plain JSON values, its kind first; of fields that are not known those that are null."""
        return _known(msgspec.to_builtins(self))

    def encoded(self) -> str:
        """The line, without its end. As Python writes JSON: a loss that is not finite is no null."""
        return json.dumps(self.plain())


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _known(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None or key in WRITTEN_AS_NULL
    }


class Part(msgspec.Struct, kw_only=True, frozen=True):
    """A part of a row."""


class Source(Part, frozen=True, kw_only=True):
    """A source of a mixture."""

    share: float
    """Share of the sequences, in 0..1."""
    tokens: Count


class ValidationSet(Part, frozen=True, kw_only=True):
    """What is evaluated of a validation set."""

    tokens: Count
    evaluated_tokens: Count
    bytes_per_token: float | None = None
    unigram_bits_per_byte: float | None = None
    sha256: str


class Start(Row, tag="start", frozen=True, kw_only=True):
    """What is known when training begins, or resumes."""

    run: str | None = None
    attempt: Count | None = None
    step: Count
    """Steps done; more than 0 if the attempt resumes from a checkpoint."""
    updates: Count | None = None
    """Updates done."""
    time: float | None = None
    """Seconds since 1970."""
    asyncpp: str | None = None
    commit: str | None = None
    torch: str | None = None
    python: str | None = None
    host: str | None = None
    device: str | None = None
    threads: Count | None = None
    replayed: bool | None = None
    """Whether one process ran all ranks in turn: its times say nothing about a pipeline."""
    shared_gpu: bool | None = None
    compiled: bool | None = None
    warm_up_seconds: float | None = None
    """Seconds of the writing process before training."""
    parameters: Count | None = None
    active_parameters: Count | None = None
    stage_parameters: list[Count] | None = None
    rank_of_stage: list[Count] | None = None
    microbatches: Count | None = None
    microbatch_size: Count | None = None
    context: Count | None = None
    tokens_per_step: Count | None = None
    bytes_per_token: float | None = None
    """Bytes per token of the headline's text; None if the data does not say."""
    unigram_bits_per_byte: float | None = None
    corpus_sha256: str | None = None
    sources: dict[str, Source] | None = None
    """Sources of a mixture, by name."""
    validation: dict[str, ValidationSet] | None = None
    """By name, where there are several."""
    attention_share: float | None = None
    """Share of causal attention that is within documents, in 0..1 (`data.document_mask`)."""
    code_sha256: dict[str, Any] | None = None
    """Hashes of own code, by section of the configuration."""

    @property
    def done(self) -> int:
        """Updates done before; where each step has one, rows of earlier versions name the step alone."""
        return self.step if self.updates is None else self.updates


class Step(Row, tag="step", frozen=True, kw_only=True, gc=False):
    """An update of the last stage."""

    step: Count
    """Updates done."""
    tokens: Count
    """Trained on so far."""
    train_loss: float | None
    """Nats per token."""
    lr: float | None
    grad_norm: float | None
    """None if it is not measured."""
    skipped: bool
    """Whether the update was left out, for a gradient that is not finite."""
    seconds: float
    """Training time so far."""


class SetLoss(Part, frozen=True, kw_only=True):
    """The loss of a validation set, in nats per token."""

    val_loss: float
    val_loss_error: float | None = None
    """Its standard error, from the evaluation's micro-batches; None for one."""
    val_loss_ema: float | None = None
    """Loss of the average of the weights, if the run has one."""


class Evaluation(Row, tag="eval", frozen=True, kw_only=True):
    """An evaluation, with the loss of the headline."""

    step: Count
    tokens: Count
    """Trained on so far."""
    val_loss: float
    val_loss_error: float | None = None
    val_loss_ema: float | None = None
    sets: dict[str, SetLoss] | None = None
    """By validation set, where there are several."""
    seconds: float
    """Training time so far."""


class Experts(Part, frozen=True, kw_only=True):
    """The load of experts in a segment, as lists by block of experts."""

    blocks: list[Count]
    max_over_mean: list[float]
    entropy: list[float]
    never_chosen: list[Count]


class Segment(Row, tag="segment", frozen=True, kw_only=True):
    """What the ranks measured from a start to a drain."""

    first_step: Count
    steps: Count
    steady_tokens: Count
    steady_seconds: float
    busy: Numbers
    """For each rank, the share of the steady time in which it did not wait; empty in a replay."""
    action_seconds: dict[str, Numbers] | None = None
    """Mean seconds by action, then by stage."""
    compute_seconds: list[Numbers] | None = None
    """Seconds of a micro-batch, by rank, then by data rank."""
    hosts: list[list[str]] | None = None
    """By rank, then by data rank; None if there is one."""
    delay_min: list[Count | None] | None = None
    delay_max: list[Count | None]
    """By stage, in updates; None for a stage that made none."""
    mismatch_max: list[Count]
    """By stage, in versions."""
    memory: dict[str, list[Count]] | None = None
    """Bytes by kind."""
    experts: Experts | None = None
    load_per_core: float | None = None
    """Load average of the writer's machine over one minute, per core."""
    seconds: float
    """Training time so far."""

    @property
    def last_step(self) -> int:
        return self.first_step + self.steps

    @property
    def tokens_per_second(self) -> float | None:
        """In steady state; None if no time was measured there."""
        return self.steady_tokens / self.steady_seconds if self.steady_seconds > 0 else None


class Pause(Row, tag="pause", frozen=True, kw_only=True):
    """The run pauses, after an evaluation and a checkpoint."""

    step: Count
    seconds: float | None = None


class End(Row, tag="end", frozen=True, kw_only=True):
    """The run is complete."""

    step: Count
    seconds: float | None = None
    weights_sha256: str | None = None
    """Hash over all parameters, by name."""


AnyRow = Start | Step | Evaluation | Segment | Pause | End

_KINDS = {each.__struct_config__.tag for each in get_args(AnyRow)}
_decoder = msgspec.json.Decoder(AnyRow)


class TornError(Exception):
    """A line is no row: it was cut off, or written over."""


def parsed(line: bytes) -> Row | None:
    """The row in a line; None for one of a kind that this version does not have.

    Raises:
        TornError: the line is no JSON object whose kind is text.
        RowError: the row lacks a field of its kind, or has a value of another type in it.
    """
    try:
        row: Row = _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return _parsed_as_python_writes(line)
    return row


def _parsed_as_python_writes(line: bytes) -> Row | None:
    """The row in a line that may have NaN and Infinity, which are no JSON; or what is wrong with the line."""
    try:
        values = json.loads(line)
        json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise TornError from error
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise TornError
    if values["kind"] not in _KINDS:
        return None
    try:
        row: Row = msgspec.convert(values, AnyRow)
    except msgspec.ValidationError as error:
        raise RowError(f"a row of kind {values['kind']}: {error}") from error
    return row


def read(lines: Iterable[bytes], *, all_whole: bool = True) -> tuple[list[Row], int]:
    """The valid rows in the lines of a file, and the number of torn lines, which are left out.

    A later attempt repeats the steps after its beginning: rows that it repeats are left out, too.

    Args:
        lines: of the file.
        all_whole: whether a damaged row is an error; otherwise it is left out.

    Raises:
        RowError: see `parsed`.
    """
    known, torn = _decoded(list(lines), all_whole=all_whole)
    rows: list[Row] = []
    for row in known:
        if type(row) is Start:
            rows = [earlier for earlier in rows if still_valid(earlier, start=row)]
        rows.append(row)
    return rows, torn


def _decoded(lines: list[bytes], *, all_whole: bool) -> tuple[list[Row], int]:
    """The rows in the lines, and the number of torn lines. Arguments are those of `read`."""
    try:
        together: list[Row] = [*_decoder.decode_lines(b"\n".join(lines))]
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        together = []
    if len(together) == len(lines) and all(lines):
        return together, 0
    # One by one, which takes several times as long: a line is torn, of a later version, or has a NaN.
    rows: list[Row] = []
    torn = 0
    for line in lines:
        try:
            row = parsed(line)
        except TornError:
            torn += 1
            continue
        except RowError:
            if all_whole:
                raise
            continue
        if row is not None:
            rows.append(row)
    return rows, torn


def still_valid(row: Row, *, start: Start) -> bool:
    """Whether a row remains valid after an attempt that resumed with this `start` row."""
    match row:
        case Step():
            # Step rows count updates, of which some schedules have several per step.
            return row.step <= start.done
        case Start():
            # An earlier attempt that got no further than this one's beginning has nothing to report.
            return row.step < start.step
        case Segment():
            return row.last_step <= start.step
        case Evaluation() | Pause():
            return row.step <= start.step
    return False
