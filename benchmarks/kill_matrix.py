"""The kill matrix: two ranks, one of them killed again and again around saves, restarted and checked.

    python -m benchmarks.kill_matrix [KILLS] [SEED]     from the repository's root

What happens in a life, and what counts as wrong, is in tests/checkpoint/killing.py. Writes
benchmarks/results/kill_matrix.json: how many died where, and what was wrong, which must be nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.checkpoint import killing

RESULT = Path(__file__).parent / "results" / "kill_matrix.json"


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 240
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        report = killing.main(Path(folder), count, seed)
    report["torch"] = torch.__version__
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
