"""Makes the repository's `benchmarks` and the tests' own helpers importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
