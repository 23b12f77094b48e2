"""python -m nki_sim SCRIPT [ARGS...]: run a script with `import nki` in place."""

import runpy
import sys
from pathlib import Path

from .install import install


def main():
    if len(sys.argv) < 2:
        sys.exit("usage: python -m nki_sim SCRIPT [ARGS...]")
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
