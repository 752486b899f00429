"""Import format of TRL: completions_<step>.parquet, written by `log_completions`, with texts, rewards and advantages."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from .dump_rows import DumpRows
from .format import Format, Reading
from .rowbatch import ROWS_AT_ONCE, RowBatch, explained

_TEXTS = ("step", "prompt", "completion")

COLUMNS = {"step": ("step",), "advantage": ("advantage",), "prompt": ("prompt",), "completion": ("completion",)}


def _read(reading: Reading) -> Iterator[RowBatch]:
    (path,) = reading.paths()
    budget = reading.budget()
    with explained(str(path), "Parquet"), path.open("rb") as file:
        parquet = pq.ParquetFile(file)
        # Texts are not read: they may be large, and a trace does not store them.
        tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        kept = [field.name for field in parquet.schema_arrow if any(test(field.type) for test in tests)]
        first = 1
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=kept):
            rows = DumpRows(str(path))
            for place, record in enumerate(batch.to_pylist()):
                fields = reading.fields(record, f"{path}, row {first + place}", budget)
                step = fields.integer("step")
                rows.add(
                    first + place,
                    step=reading.part.step if step is None else step,
                    seq_id=str(first + place - 1),
                    advantage=fields.number("advantage"),
                    rewards=fields.numbers(_TEXTS),
                )
            first += batch.num_rows
            if len(rows):
                yield rows.batch()


TRL = Format(
    name="trl",
    writes="`log_completions=True`",
    files="completions/completions_<step>.parquet",
    columns=COLUMNS,
    alignment="texts only, no token ids or logprobs; every other numeric column is a reward function",
    pattern=r"completions_(\d+)\.parquet",
    read=_read,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "log_completions writes texts and rewards but no token ids or logprobs; record the run: tim-trace record -o RUN -- python "
        "train.py",
    ),
)
