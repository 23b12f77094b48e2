"""`python -m qwen3_trainium COMMAND …`"""

import importlib
import signal
import sys

from qwen3_trainium import cpu
from qwen3_trainium.errors import SettingError

# command: (module with `main(argv) -> exit code`, what it does)
COMMANDS = {
    "check": ("preflight", "look at this machine: versions, devices, disk, memory, assets"),
    "run": ("runner", "run the lessons headless; write notebooks, report and verdict"),
    "launch": ("launch", "start one recipe of configs/ with torchrun"),
    "dry-run": ("dryrun", "step rank 0 of 64 fake ones at the instance's real widths"),
    "verify": ("verify", "verify an exported checkpoint folder"),
}


def main(argv: list[str]) -> int:
    usage = "usage: python -m qwen3_trainium COMMAND [--help]\n" + "\n".join(
        f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()
    )
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"command {argv[0]!r} is unknown\n{usage}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    cpu.hide_accelerators()  # every command computes on the CPU itself, or in ranks of its own
    # A machine that ends a job sends SIGTERM: clean up as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return importlib.import_module(f"qwen3_trainium.{module}").main(argv[1:])
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
