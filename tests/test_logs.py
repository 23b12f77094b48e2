"""A failed run is told by its first error, not by its last line."""

import pytest

from qwen3_trainium import logs

# torchrun's wall, shortened: what a reader sees at the end of every failed run.
WALL = """\
W1130 10:32:42.627000 9667 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 9674 closing signal SIGTERM
E1130 10:32:42.725000 9667 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 9675) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "torch/distributed/launcher/api.py", line 386, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
qwen3_trainium.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_10:32:42
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 9674)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 9674
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_10:32:42
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 9675)
  error_file: <N/A>
============================================================
"""  # noqa: E501


def traceback(rank: int, error: str, prefix: str = "[rank{0}]:[rank{0}]: ") -> list[str]:
    lines = [
        "Traceback (most recent call last):",
        '  File "/opt/app/train.py", line 70, in main',
        "    trainer.train()",
        '  File "/opt/app/model.py", line 12, in forward',
        "    return self.layer(x)",
        error,
    ]
    return [prefix.format(rank) + line for line in lines]


def interleaved(*tracebacks: list[str]) -> str:
    """Lines of several tracebacks in turn, as ranks that fail at once write them."""
    return "\n".join(line for lines in zip(*tracebacks, strict=True) for line in lines) + "\n"


def test_first_error_of_64_ranks_and_not_the_last_line():
    ranks = [
        traceback(rank, "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.1]:41241")
        for rank in range(64)
    ]
    ranks[37] = traceback(37, "RuntimeError: neuronx-cc compilation failed with 70")
    noise = "\n".join(f"[rank{rank}]:[INFO] step: 1 loss: 12.4 error: none" for rank in range(64))
    summary = logs.summarise(f"{noise}\n{interleaved(*ranks)}{WALL.format(rank=3, code=1)}")
    first, error, known, others = summary.splitlines()
    assert first == "rank 37 failed first (model.py:12 in forward):"
    assert error.strip() == "RuntimeError: neuronx-cc compilation failed with 70"
    assert "fewer parallel compilations" in known
    assert others.strip() == "63 other ranks stopped after it"


def test_rank_is_taken_from_torchrun_when_the_lines_do_not_tell():
    text = interleaved(traceback(0, "qwen3_trainium.errors.SettingError: no such file", prefix=""))
    summary = logs.summarise(text + WALL.format(rank=5, code=1))
    assert summary.startswith("rank 5 failed first (model.py:12 in forward):")
    assert "SettingError: no such file" in summary


def test_first_of_chained_exceptions_is_the_cause():
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    first = traceback(2, "KeyError: 'model.norm.weight'")
    second = traceback(2, "RuntimeError: load failed")
    assert "KeyError: 'model.norm.weight'" in logs.summarise("\n".join(first + between + second))


def test_exception_with_an_unusual_name_ends_a_traceback():
    text = "\n".join(traceback(1, "torch.fx.Unsupported: data dependent"))
    assert "torch.fx.Unsupported: data dependent" in logs.summarise(text)


def test_bare_exception_is_told_with_its_statement():
    assert "AssertionError: return self.layer(x)" in logs.summarise(
        "\n".join(traceback(1, "AssertionError"))
    )


def test_refused_command_line_is_the_error():
    """As torchtitan's parser prints it: a box, no exception, exit code 2."""
    box = (
        "[rank1]:╭─ Unrecognized options ─────────────────╮\n"
        "[rank1]:│ Unrecognized options: --training.no-such=3  │\n"
        "[rank1]:│ ───────────────────────────────────────── │\n"
        "[rank1]:╰─────────────────────────────────────────╯\n"
    )
    summary = logs.summarise(box + WALL.format(rank=1, code=2))
    assert summary.splitlines() == [
        "rank 1 failed first:",
        "  Unrecognized options: --training.no-such=3",
    ]


def test_rank_that_ends_without_an_exception_is_told_by_its_last_lines():
    text = "[rank1]:[titan] 10:46 - root - INFO - step 1\n[rank1]:assets are gone, giving up\n"
    summary = logs.summarise(text + WALL.format(rank=1, code=3))
    assert summary == "rank 1 failed first:\n  assets are gone, giving up"


def test_source_lines_of_a_traceback_are_not_taken_for_errors():
    lines = traceback(0, "ValueError: wrong")
    lines.insert(3, "[rank0]:[rank0]:     raise RuntimeError('No space left on device: error')")
    assert logs.summarise("\n".join(lines)).splitlines()[1].strip() == "ValueError: wrong"


def test_killed_rank_is_the_cause_and_lost_connections_are_not():
    lost = interleaved(traceback(0, "RuntimeError: Connection reset by peer"))
    summary = logs.summarise(lost + WALL.format(rank=1, code=-9))
    assert summary.startswith("rank 1 failed first:\n  ended by SIGKILL")
    assert "1 other rank stopped" in summary


def test_colours_are_removed_and_tokens_hidden():
    error = "OSError: 401 for token hf_" + "AbCd1234" * 4
    text = "\n".join(traceback(0, f"\x1b[31m{error}\x1b[0m"))
    summary = logs.summarise(text)
    assert "OSError: 401 for token hf_…" in summary
    assert "AbCd" not in summary
    assert "\x1b" not in summary


@pytest.mark.parametrize("text", ["", "[rank0]:[INFO] step: 10 loss: 3.2\n"])
def test_log_without_an_error_has_no_summary(text):
    assert logs.summarise(text) == ""


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "2026-Nov-30 ERROR NRT:nrt_init This Neuron Runtime (compatibility id: 7) is "
            "not compatible with the installed aws-neuron-dkms package",
            "driver older than runtime: upgrade aws-neuronx-dkms",
        ),
        (
            "2026-Nov-30 ERROR NMGR:load NEFF version: 2.0, features: 0x100 are not supported",
            "compiler newer than runtime",
        ),
        ("[NCC_ILLC059] internal error in lowering", "LNC=2"),
        ("ERROR: [NCC_IXLV002] verification failed", "LNC=2"),
        ("[NCC_EOOM001] Estimated peak HBM usage (22.839451) exceeds 16GB", "shorten seq_len"),
        ("ERROR NRT:nrt_load_collectives status=2", "no group size"),
        ("RuntimeError: cannot determine the number of available NeuronCores", "PID"),
        ("ERROR NRT:nrt_allocate NeuronCore(s) not available - Requested:nc1-nc1", "PID"),
        ("ERROR TDRV:alloc Failed to allocate 172.000MB (usage: tensors) on ND 0:NC 0", "device"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3. Stopping", "log_freq"),
        ("MemoryError", "host memory is full"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate", "host memory is full"),
        ("torch.distributed.DistNetworkError: EADDRINUSE, Address already in use", "port"),
        ("SafetensorError: invalid JSON in header: unknown variant", "truncated or corrupt"),
        ("ImportError: cannot import name 'set_timeout' from 'torch.distributed'", "check"),
        ("AttributeError: module 'nki' has no attribute 'simulate_kernel'", "older NKI"),
    ],
)
def test_known_issue_is_named(line, advice):
    for text in (line, "\n".join(traceback(3, line))):
        assert advice in logs.summarise(f"[rank3]: starting\n{text}\n"), line
