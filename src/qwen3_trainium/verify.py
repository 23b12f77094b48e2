"""Prove that an exported Hugging Face folder is the model that was trained.

    python -m qwen3_trainium verify EXPORT --source FOLDER [--heldout FILE.jsonl --loss 3.21]

The weights are compared tensor by tensor, the model is reloaded by plain Transformers, and its
loss is computed here from the logits: handing labels to the model would shift them a second time.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import torch
from safetensors import safe_open
from torch.nn import functional

from qwen3_trainium import guards, rotary
from qwen3_trainium.attention import document_mask
from qwen3_trainium.errors import SettingError
from qwen3_trainium.weights import (
    EMBEDDING,
    HEAD,
    Tensor,
    expected_shapes,
    facts,
    read_json,
    stored_tensors,
)

# Two float32 programs with the same weights and tokens, summed in different orders: a dot product
# of K terms is off by about √K·2⁻²⁴ of its size, 6e-6 for K = 9,728; 2·36 residual additions of
# such errors grow to √72 times that, 5e-5. A mean over tokens does not grow it further. Nats a
# token; lessons and tests take the number from here.
FLOAT32_TOLERANCE = 1e-4
IGNORED_LABEL = -100
# Files that make weights a model folder; each must be in an export when its source has it.
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "vocab.json", "merges.txt", "special_tokens_map.json"),
)
RELOAD = "The export reloads in plain Transformers"
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One verified statement; the fields are the arguments of `checks.check`.

    `passed` is None when it could not be evaluated, and `detail` then says why.
    """

    id: str
    title: str
    expected: object
    measured: object
    passed: bool | None
    detail: str = ""


def verify(
    export: Path | str,
    source: Path | str,
    batches: Iterable[dict] = (),
    trained_loss: float | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
    dtype: str | None = None,
) -> list[Finding]:
    """Findings about `export`, a folder trained from `source`; nothing is raised for a fault in it.

    batches        held-out tokens as `heldout_loss` takes them; without any, no loss is compared
    trained_loss   what the trainer measured on them with its last weights, in nats a token
    tolerance      absolute; the default is derived for float32
    dtype          "float32" or "bfloat16" if the export is not in the dtype of the source's config
    """
    export, source, batches = Path(export), Path(source), list(batches)
    config = read_json(source / "config.json")
    keys = check_keys(export, config, dtype)
    findings = [keys, check_tied_head(export, config), check_finite(export)]
    findings += [check_companions(export, source), check_changed(source, export)]
    if keys.passed and all(finding.passed is not False for finding in findings):
        return [*findings, check_reload(export, batches, trained_loss, tolerance)]
    reason = "not reloaded, an earlier finding failed"
    return [*findings, Finding("hf.export.reload", RELOAD, None, None, None, reason)]


def check_keys(export: Path, config: dict, dtype: str | None = None) -> Finding:
    """Index, shards and config agree: every key is there and none besides, shapes and dtypes."""
    id, title = "hf.export.keys", "Keys, shapes and dtypes of the export"
    dtype = dtype or config.get("dtype") or config.get("torch_dtype") or "float32"
    expected = f"{len(expected_shapes(config))} keys of {dtype}"
    try:
        tensors = stored_tensors(export)
        guards.check_keys(tensors, config, export)
        for key, tensor in tensors.items():
            if tensor.dtype != SAFETENSORS_NAMES[dtype]:
                raise SettingError(f"{key} is stored as {tensor.dtype}, not as {dtype}")
    except SettingError as error:
        return Finding(id, title, expected, "others", False, str(error))
    measured = f"{len(tensors)} keys of {dtype}"  # one more when a tied head is stored as well
    files = len({tensor.file for tensor in tensors.values()})
    stored = sum(tensor.bytes for tensor in tensors.values())
    detail = f"{files} file(s), {stored:,} bytes, shapes as config.json implies"
    return Finding(id, title, expected, measured, True, detail)


def check_tied_head(export: Path, config: dict) -> Finding:
    """A tied head is absent or bit for bit the embedding; an untied one is present."""
    id, title = "hf.export.tied_lm_head", "lm_head.weight is as the config ties it"
    tied = facts(config).tied
    expected = "absent or equal to the embedding" if tied else "present"
    try:
        tensors = stored_tensors(export)
        if not tied or HEAD not in tensors:
            measured = "present" if HEAD in tensors else "absent"
            return Finding(id, title, expected, measured, tied or measured == expected)
        head, embedding = read_tensors(export, tensors, [HEAD, EMBEDDING])
    except (SettingError, KeyError) as error:
        return Finding(id, title, expected, "unreadable", False, str(error))
    if torch.equal(head, embedding):
        return Finding(id, title, expected, "equal to the embedding", True)
    detail = f"{HEAD} differs from {EMBEDDING} although the config ties them: export one of them"
    return Finding(id, title, expected, "present and different", False, detail)


def check_finite(export: Path) -> Finding:
    """No NaN and no infinity in any tensor; one tensor is in memory at a time."""
    id, title = "hf.export.finite", "All exported values are finite"
    try:
        tensors = stored_tensors(export)
    except SettingError as error:
        return Finding(id, title, "all finite", "unreadable", False, str(error))
    wrong = [
        key
        for key, tensor in zip(tensors, read_tensors(export, tensors, tensors), strict=True)
        if not torch.isfinite(tensor).all()
    ]
    detail = f"{len(tensors)} tensors read" + (f"; first: {wrong[0]}" if wrong else "")
    return Finding(id, title, "0 tensors with others", f"{len(wrong)} tensors", not wrong, detail)


def check_companions(export: Path, source: Path) -> Finding:
    """The export is a whole model folder: same model in config.json, tokenizer, generation config.

    The dtype that config.json gives is the stored one, so that a reload does not convert.
    """
    id, title = "hf.export.files", "Config, generation config and tokenizer lie beside the weights"
    expected = [name for name in COMPANIONS if (source / name).is_file()]
    missing = [name for name in ["config.json", *expected] if not (export / name).is_file()]
    if missing:
        return Finding(id, title, "all of them", f"without {', '.join(missing)}", False)
    try:
        ours, theirs = (read_json(folder / "config.json") for folder in (export, source))
        if facts(ours) != facts(theirs):
            differ = [
                field
                for field, value in dataclasses.asdict(facts(ours)).items()
                if value != getattr(facts(theirs), field)
            ]
            raise SettingError(f"config.json differs from the source's in {', '.join(differ)}")
        said = ours.get("dtype") or ours.get("torch_dtype") or "float32"
        stored = sorted({tensor.dtype for tensor in stored_tensors(export).values()})
        if stored != [SAFETENSORS_NAMES[said]]:
            raise SettingError(f"config.json gives dtype {said}, but stored are {stored}")
        guards.check_tokenizer(export, ours)
        if (export / "tokenizer.json").read_bytes() != (source / "tokenizer.json").read_bytes():
            raise SettingError("tokenizer.json is not the source's")
    except SettingError as error:
        return Finding(id, title, "all of them", "a difference", False, str(error))
    return Finding(id, title, "all of them", "all of them", True, ", ".join(expected))


def tensor_changes(source: Path | str, export: Path | str) -> pd.DataFrame:
    """How far each tensor moved: one row a tensor that both folders hold, in the source's order.

    Columns: key, numel, relative (‖new − old‖ / ‖old‖, Frobenius norms in float32), largest
    (max |new − old|). One pair of tensors is in memory at a time.
    """
    source, export = Path(source), Path(export)
    before, after = stored_tensors(source), stored_tensors(export)
    keys = [key for key in before if key in after and before[key].shape == after[key].shape]
    pairs = zip(read_tensors(source, before, keys), read_tensors(export, after, keys), strict=True)
    rows = []
    for key, (old, new) in zip(keys, pairs, strict=True):
        old, difference = old.float(), new.float() - old.float()
        norm = old.norm().item()
        moved = difference.norm().item()
        relative = moved / norm if norm else math.inf * bool(moved)
        rows.append((key, old.numel(), relative, difference.abs().max().item()))
    return pd.DataFrame(rows, columns=["key", "numel", "relative", "largest"])


def check_changed(source: Path, export: Path) -> Finding:
    """Training moved the weights: an export of the starting weights would pass all else."""
    id, title = "hf.export.changed", "The weights differ from the starting ones"
    try:
        changes = tensor_changes(source, export)
    except SettingError as error:
        return Finding(id, title, "at least one tensor", "unreadable", False, str(error))
    moved = changes[changes.largest > 0]
    detail = f"largest relative change {changes.relative.max():.3g}" if len(moved) else ""
    measured = f"{len(moved)} of {len(changes)} tensors"
    return Finding(id, title, "at least one tensor", measured, len(moved) > 0, detail)


def check_reload(
    export: Path, batches: list[dict], trained_loss: float | None, tolerance: float
) -> Finding:
    """AutoModelForCausalLM loads the folder offline, leaves no key fresh, and gives the loss."""
    id, title = "hf.export.reload", RELOAD
    try:
        model, info = load_model(export)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        return Finding(id, title, "loads", "does not load", False, str(error).partition("\n")[0])
    # A tied head is no missing key: Transformers ties it before it reports.
    wrong = [
        key for kind in ("missing", "unexpected", "mismatched") for key in info[f"{kind}_keys"]
    ]
    if wrong:
        return Finding(id, title, "0 keys fresh or unused", len(wrong), False, str(wrong[0]))
    if not batches:
        return Finding(id, title, "loads", "loads", True, "no held-out text was given for a loss")
    loss = heldout_loss(model, batches)
    if trained_loss is None:
        detail = "the trained loss was not given to compare with"
        return Finding(id, title, "a finite loss", loss, math.isfinite(loss), detail)
    passed = abs(loss - trained_loss) <= tolerance
    detail = f"loss as trained; plain Transformers, float32, absolute tolerance {tolerance:g}"
    return Finding(id, title, trained_loss, loss, passed, detail)


def load_model(folder: Path | str) -> tuple[torch.nn.Module, dict]:
    """A folder as plain Transformers reads it, float32 on the CPU, and what the load reports.

    Offline, without code from the folder, safetensors only; eager attention, the one that states
    its mathematics in plain operations.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # bars make a notebook's stored output differ from run to run
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if wrong := rotary.problem(model):
        # Seen when something in this process has replaced Transformers' own initialisation.
        raise RuntimeError(f"the reference is not sound: {wrong}")
    return model.eval(), info


def heldout_loss(model: torch.nn.Module | Path | str, batches: Iterable[dict]) -> float:
    """Mean cross entropy in nats a token over all batches, from plain Transformers' logits.

    model     a loaded causal model, or the folder to load one from (float32)
    batches   dicts of integer tensors [B, S]: `input_ids`; `labels`, *already shifted*, −100 where
              no token is predicted; optionally `positions`, which restart at 0 with each document:
              a token then sees only its own document

    Raises SettingError when no label is left to predict (its mean would be not-a-number).
    """
    if isinstance(model, (str, Path)):
        model, _ = load_model(model)
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            loss = token_losses(model, **batch)
            total += loss.double().sum().item()
            count += int((batch["labels"] != IGNORED_LABEL).sum())
    if not count:
        raise SettingError(
            "the held-out text has no token to predict, all labels are ignored: "
            "give longer documents"
        )
    return total / count


def token_losses(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of each token, float32 [B, S], 0 where the label is ignored.

    Integers [B, S] as in `heldout_loss`. Without positions, plain causal attention over S.
    """
    mask = None if positions is None else additive_mask(positions, model.dtype)
    output = model(
        input_ids=input_ids.long(),
        position_ids=None if positions is None else positions.long(),
        attention_mask=mask,
        use_cache=False,
    )
    logits = output.logits.float()
    losses = functional.cross_entropy(
        logits.flatten(0, 1),
        labels.long().flatten(),
        reduction="none",
        ignore_index=IGNORED_LABEL,
    )
    return losses.view(labels.shape)


def additive_mask(positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`attention.document_mask` of positions [B, S] as Transformers adds it: 0 or −∞."""
    seen = document_mask(positions)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -math.inf)


def heldout_batches(
    folder: Path | str, file: Path | str, seq_len: int = 256, limit: int = 16
) -> list[dict]:
    """Up to `limit` batches [1, seq_len] of packed documents from a JSON-lines file.

    Tokens are those of the folder's tokenizer; each document ends with its end-of-sequence token.
    Raises SettingError for a missing file or tokenizer, a line without `text`, or when the file
    fills not one batch.
    """
    from transformers import AutoTokenizer

    if not Path(file).is_file():
        raise SettingError(f"held-out file {file} does not exist: name a file of JSON lines")
    # Without its files, Transformers makes a tokenizer that finds no token in any text.
    guards.check_tokenizer(folder, read_json(Path(folder) / "config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids, positions, batches = [], [], []
    with Path(file).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if (wrong := guards.wrong_document(line)) is not None:
                raise SettingError(f"line {number} of {file} {wrong}: give JSON lines with 'text'")
            # Documents longer than the model's context are cut below: no warning is due.
            document = tokenizer(json.loads(line)["text"], verbose=False)["input_ids"]
            document.append(tokenizer.eos_token_id)
            ids += document
            positions += range(len(document))
            while len(ids) > seq_len and len(batches) < limit:
                window = torch.tensor([ids[: seq_len + 1]])
                batches.append(
                    {
                        "input_ids": window[:, :-1],
                        "labels": window[:, 1:],
                        "positions": torch.tensor([positions[:seq_len]]),
                    }
                )
                ids, positions = ids[seq_len:], positions[seq_len:]
            if len(batches) == limit:
                return batches
    if not batches:
        raise SettingError(
            f"{file} holds fewer than {seq_len + 1} tokens: give a longer held-out file"
        )
    return batches


def read_tensors(
    folder: Path, tensors: dict[str, Tensor], keys: Iterable[str]
) -> Iterator[torch.Tensor]:
    """The named tensors one by one, in the order of `keys`; each file is opened once."""
    open_files = {}
    for key in keys:
        name = tensors[key].file
        if name not in open_files:
            open_files[name] = safe_open(folder / name, framework="pt")
        yield open_files[name].get_tensor(key)


def main(argv: list[str]) -> int:
    """The command; returns 0 when every finding passed or was not evaluable, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m qwen3_trainium verify", description=__doc__)
    parser.add_argument("export", type=Path, help="the exported Hugging Face folder")
    parser.add_argument("--source", type=Path, required=True, help="the folder training began from")
    parser.add_argument("--heldout", type=Path, help="JSON lines that were not trained on")
    parser.add_argument("--loss", type=float, help="the trained model's loss on them")
    parser.add_argument("--dtype", choices=SAFETENSORS_NAMES, help="unless the source config's")
    args = parser.parse_args(argv)
    for folder in (args.export, args.source):
        if not folder.is_dir():
            raise SettingError(f"folder {folder} does not exist: name a checkpoint folder")
    if args.loss is not None and not args.heldout:
        raise SettingError("--loss is compared on held-out text: give its file with --heldout")
    batches = heldout_batches(args.source, args.heldout) if args.heldout else []
    findings = verify(args.export, args.source, batches, args.loss, dtype=args.dtype)
    for finding in findings:
        print(line(finding))
    return int(any(finding.passed is False for finding in findings))


def line(finding: Finding) -> str:
    """A finding as one line of text."""
    state = {True: "OK", False: "FAIL", None: "SKIP"}[finding.passed]
    text = f"[{state}] {finding.title}"
    if finding.passed is not None:
        text += f": expected {finding.expected}, found {finding.measured}"
    return text + (f" ({finding.detail})" if finding.detail else "")
