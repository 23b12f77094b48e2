"""A run folder's metrics as a table: one row a step.

torchtitan writes every metric it prints as TensorBoard events; they are read back with
TensorBoard's own reader, not parsed out of the log.
"""

import math
import re
from pathlib import Path

import pandas as pd

# torchtitan's tags, and the column that a lesson uses. Units stand in the column's name.
COLUMNS = {
    "loss_metrics/global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "throughput(tps)": "tokens_per_s_rank",
    "time_metrics/end_to_end(s)": "seconds",
    "mfu(%)": "mfu_percent",
    "memory/max_reserved(GiB)": "memory_gib",
    "validation_metrics/loss": "heldout_loss",
}


def read(folder: Path) -> pd.DataFrame:
    """Metrics of a run, indexed by step; a resumed run's later events replace earlier ones.

    `seconds` is one step's time; the first step holds set-up and, on Neuron, compilation.
    `memory_gib` is the peak on rank 0: device memory, or resident memory of the process on CPU.
    `heldout_loss` is the mean over the ranks' held-out tokens, on the steps that measured it.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows: dict[int, dict[str, float]] = {}
    for path in sorted(Path(folder).glob("tb/**/events.out.tfevents.*"), key=_written):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            column = COLUMNS.get(tag) or ("learning_rate" if tag.startswith("lr/") else None)
            for event in events.Scalars(tag) if column else []:
                rows.setdefault(event.step, {})[column] = event.value
    if not rows:
        raise FileNotFoundError(f"{Path(folder).name} holds no metrics: did the run reach step 1?")
    return pd.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")


def _written(path: Path) -> tuple[str, str]:
    # tb/<date-time>/events.out.tfevents.<seconds>.<host>.<pid>.<n>
    return path.parent.name, path.name


def sustained(metrics: pd.DataFrame) -> pd.DataFrame:
    """The steps after the first: warm-up and sustained speed are never averaged together."""
    return metrics.iloc[1:]


def identity(folder: Path) -> dict[str, int]:
    """What the run itself said it trains: {"parameters", "ranks"}, from the first lines of its log.

    A launcher that names the wrong module trains another model without an error; these two numbers
    tell. `ranks` is the product of the mesh's degrees.
    """
    log = (Path(folder) / "log.txt").read_text(errors="replace")
    size = re.search(r"size: ([\d,]+) total parameters", log)
    mesh = re.search(r"Building device mesh with parallelism: (.*)", log)
    if not size or not mesh:
        raise ValueError(f"the log of {Path(folder).name} names no model: did the run begin?")
    # ep divides the data-parallel ranks again, so it is no factor of its own.
    degrees = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", mesh[1]) if k != "ep"}
    return {"parameters": int(size[1].replace(",", "")), "ranks": math.prod(degrees.values())}
