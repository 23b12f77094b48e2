"""What stands behind the lessons: launching, reading and checking Qwen3 runs of torchtitan."""

import sys
from pathlib import Path

# Recipes are the package `configs` at the repository's root. Lessons run in notebooks/ and ranks
# anywhere, so the root is made importable here, last in line so that it shadows nothing.
_ROOT = str(Path(__file__).resolve().parents[2])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
