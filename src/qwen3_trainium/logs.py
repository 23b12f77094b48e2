"""Read a failed run's log: which rank failed first, with what, and what is known about it.

Many ranks write into one log. When one fails, the others lose their connection to it and print
errors of their own, and torchrun ends with a wall about the last ones. What a reader needs is
almost always near the top.
"""

import dataclasses
import re
import signal

# Error fragment → what it means and what to do. The first that matches is used, so that particular
# ones stand before general ones.
KNOWN_ISSUES = (
    (
        r"not compatible with the installed aws-neuronx?-dkms"
        r"|requires Neuron Driver version|Unable to determine Neuron Driver version",
        "driver older than runtime: upgrade aws-neuronx-dkms together with aws-neuronx-runtime-lib "
        "and aws-neuronx-collectives, then reload the driver",
    ),
    (
        r"NEFF version|Unsupported hardware operator code",
        "compiler newer than runtime: bring neuronx-cc, aws-neuronx-runtime-lib, "
        "aws-neuronx-collectives and aws-neuronx-dkms to one SDK release",
    ),
    (
        r"NCC_ILLC059|NCC_IXLV002",
        "known compiler fault with LNC=2: use a newer neuronx-cc, set NEURON_LOGICAL_NC_CONFIG=1, "
        "or call the kernel once a graph",
    ),
    (
        r"NCC_EOOM00\d|Estimated peak HBM usage",
        "the graph needs more device memory than a core has: shorten seq_len, turn on activation "
        "checkpointing, or shard over more ranks",
    ),
    (
        r"Failed to allocate [\d.]+ ?[KMG]?B.* on ND|RESOURCE_EXHAUSTED|needed \d+ available \d+",
        "device memory is full: shorten seq_len, lower the local batch, or shard over more ranks",
    ),
    (
        r"cannot determine the number of available NeuronCores|NeuronCore\(s\) not available",
        "another process holds the NeuronCores: find its PID with neuron-ls, and shut down that "
        "notebook kernel or job",
    ),
    (
        r"nrt_load_collectives",
        "this number of ranks is no group size that collectives support: "
        "run `python -m qwen3_trainium check`",
    ),
    (
        r"neuronx-cc compilation failed|neuronx-cc.*exit(ed)? .*70",
        "one compilation failed and the other ranks only lost it: read this rank's compiler log, "
        "and retry with fewer parallel compilations",
    ),
    (
        r"neuronxcc\.nki|platform_target|simulate_kernel|precise_schedule",
        "the kernel is written for an older NKI: see the NKI version that preflight prints",
    ),
    (
        r"out-of-bound access",
        "a kernel read or wrote outside its tensor: run it in the simulator with the same shapes",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free space, or put the run folder on another disk",
    ),
    (
        r"MemoryError|Cannot allocate memory|DefaultCPUAllocator|std::bad_alloc",
        "host memory is full: use fewer ranks, a smaller model or a shorter seq_len",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the rendezvous port is taken: end the earlier run, or choose another port",
    ),
    (
        r"invalid JSON in header|InvalidHeader|HeaderTooLarge|HeaderTooSmall|MetadataIncomplete",
        "a safetensors file is truncated or corrupt: download or export it again",
    ),
    (
        r"Missing key in checkpoint state_dict|Missing key\(s\) in state_dict",
        "the checkpoint is of another model or was saved model-only: check the folder with "
        "`python -m qwen3_trainium verify`",
    ),
    (
        # A public report: NaN at every step that was logged, because the loss was read before the
        # device had written it (huggingface/optimum-neuron 792).
        r"Loss is not finite",
        "at step 1 suspect weights or rotary frequencies, later the learning rate; on Neuron run "
        "the same steps with --metrics.log_freq 5 too: if that passes, the loss was read too early",
    ),
    (
        r"cannot import name .* from '?\"?torch|module 'torch[\w.]*' has no attribute",
        "torch and torchtitan do not fit together: run `python -m qwen3_trainium check`",
    ),
    (
        r"Offline mode is enabled|Couldn't reach|offline mode",
        "something was asked from the hub while offline: name a local folder",
    ),
    (
        r"[Ww]atchdog caught collective|Timed out waiting|timed out after",
        "a rank did not arrive at a collective in time: look for the one that stopped earlier",
    ),
)
# What ranks print because *another* one failed, and what torchrun prints about all of them.
CONSEQUENCE = re.compile(
    r"Connection (closed|reset|refused)|[Bb]roken pipe|ChildFailedError|SignalException"
    r"|ncclRemoteError|Socket closed|recvValue failed|closing signal SIGTERM"
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# torchrun prefixes a line with [role3]: and torch a traceback with [rank3]:; both may be there.
PREFIX = re.compile(r"^\[[a-z_]*?(\d+)\]:\s?")
EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed)\b(?::.*)?$")
NAMED = re.compile(r"^[A-Za-z_][\w.]*: ")
FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)')
# Errors that are no exceptions: a refused command line, the Neuron runtime's and compiler's lines.
NATIVE = re.compile(
    r"^(?:Unrecognized|Required|Missing) (?:options|arguments)"
    r"|\bERROR\s+(?:NRT|TDRV|NMGR|HAL|NEURON\w*)\b|\bNCC_[A-Z]+\d+|^\[?FATAL"
)
SAYS_ERROR = re.compile(r"(?i)error|fail|cannot|not compatible")
EXIT_CODE = re.compile(r"^\s*rank\s*:\s*(\d+).*\n(?:.*\n)?\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
# The frame that the command-line parser draws around its errors.
BOX = re.compile(r"^[│╭╰][─\s]?|[─│╮╯]+$")
LOGGED = re.compile(r" - (?:INFO|WARNING) - |Warning: ")
SECRET = re.compile(r"\b(hf_|AKIA|ASIA)[A-Za-z0-9]{12,}")
LAUNCH = "=== launch: "  # begins each launch's part of a log
LONGEST = 400  # characters of an error that are shown
LAST_WORDS = 3  # lines that are shown of a rank that ended without an error


@dataclasses.dataclass(frozen=True)
class Failure:
    """One error: its rank (None if the line does not tell), text, place, and all its lines."""

    rank: int | None
    error: str
    where: str
    block: str


def last_launch(text: str) -> str:
    """The part of a log that its last launch wrote; a run that was resumed has several."""
    return text[max(text.rfind(LAUNCH), 0) :]


def summarise(text: str) -> str:
    """A failed run's log in two to four lines: the first error, its rank and place, what to do.

    `text` is the raw log of all ranks. An empty string when it holds no error at all.
    """
    text = ANSI.sub("", text)
    failures = find_failures(text)
    killed = killed_ranks(text)
    causes = [failure for failure in failures if not CONSEQUENCE.search(failure.error)]
    # Lost connections alone: the cause is on another machine. The launcher's own error is last.
    lost = [failure for failure in failures if failure.rank is not None]
    candidates = causes or killed or lost or _last_words(text) or failures
    if not candidates:
        return ""
    first = candidates[0]
    rank = first.rank if first.rank is not None else _first_observed(text)
    where = f" ({first.where})" if first.where else ""
    lines = [f"rank {'unknown' if rank is None else rank} failed first{where}:"]
    lines.append("  " + SECRET.sub(r"\1…", first.error)[:LONGEST])
    if known := hint(first.block):
        lines.append(f"  {known}")
    others = {failure.rank for failure in failures + killed} - {rank, None}
    if others:
        lines.append(f"  {len(others)} other rank{'s' * (len(others) > 1)} stopped after it")
    return "\n".join(lines)


def hint(text: str) -> str | None:
    """What is known about an error, from the first fragment of the table that it contains."""
    return next((advice for pattern, advice in KNOWN_ISSUES if re.search(pattern, text)), None)


def find_failures(text: str) -> list[Failure]:
    """Every exception and native error in the log, in the order in which they ended."""
    failures = []
    open_tracebacks: dict[int | None, list[str]] = {}
    for raw in text.splitlines():
        rank, line = _split(raw)
        block = open_tracebacks.get(rank)
        if line.startswith("Traceback (most recent call last)"):
            open_tracebacks[rank] = []
        elif block is not None and line.startswith(" "):
            block.append(line)
        elif EXCEPTION.match(line) and block is not None:
            failures.append(_failure(rank, line, open_tracebacks.pop(rank)))
        elif NATIVE.search(line) or (SAYS_ERROR.search(line) and hint(line)):
            failures.append(Failure(rank, line.strip(), "", line))
        elif block is not None and NAMED.match(line):
            # An exception whose name does not say that it is one ends a traceback as well.
            failures.append(_failure(rank, line, open_tracebacks.pop(rank)))
    return failures


def killed_ranks(text: str) -> list[Failure]:
    """Ranks that torchrun reports as ended by a signal; SIGTERM is its own, sent to the rest."""
    found = []
    for rank, code in EXIT_CODE.findall(text):
        number = -int(code)
        if number <= 0 or number == signal.SIGTERM:
            continue
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        error = f"ended by {name}"
        if number == signal.SIGKILL:
            error += ": killed by hand, or by the system because host memory was full"
        found.append(Failure(int(rank), error, "", error))
    return found


def _split(raw: str) -> tuple[int | None, str]:
    """(rank, line) without the prefixes that torchrun and torch put before it."""
    rank = None
    while match := PREFIX.match(raw):
        rank, raw = int(match[1]), raw[match.end() :]
    return rank, BOX.sub("", raw)


def _failure(rank: int | None, error: str, block: list[str]) -> Failure:
    frames = [match for match in map(FRAME.match, block) if match]
    where = ""
    if frames:
        path, line, function = frames[-1].groups()
        where = f"{path.rsplit('/', 1)[-1]}:{line} in {function}"
    source = [line.strip() for line in block if not FRAME.match(line) and line.strip(" ^~")]
    said = error.strip()
    if ":" not in said and source:
        said += f": {source[-1]}"  # a bare AssertionError says nothing, its statement does
    return Failure(rank, said, where, "\n".join([*block, error]))


def _first_observed(text: str) -> int | None:
    """The rank that torchrun names as the first to fail."""
    named = re.search(r"first observed failure[\s\S]*?rank\s*:\s*(\d+)", text)
    return int(named[1]) if named else None


def _last_words(text: str) -> list[Failure]:
    """The last lines of the rank that torchrun names, when it ended without an exception."""
    rank = _first_observed(text)
    if rank is None:
        return []
    said = [line.strip() for of, line in map(_split, text.splitlines()) if of == rank]
    last = [line for line in said if line and not LOGGED.search(line)][-LAST_WORDS:]
    error = " / ".join(last) or "ended without a word"
    return [Failure(rank, error, "", error)]
