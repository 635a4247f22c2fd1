"""The kill matrix: two ranks, one of them killed again and again around saves, restarted and checked.

    python -m benchmarks.kill_matrix [--mode shared|async|hosts|url|direct] [--kills N]   from the repository's root

What happens in a life, and what counts as wrong, is in tests/checkpoint/killing.py. Writes into
benchmarks/results/kill_matrix.json, by mode: how many died where, and what was wrong, which must be nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.checkpoint import killing

RESULT = Path(__file__).parent / "results" / "kill_matrix.json"


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--mode", choices=killing.MODES, default="shared")
    asked.add_argument("--kills", type=int, default=240)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--out", type=Path, default=RESULT)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = killing.main(Path(folder), options.kills, options.seed, options.mode)
    report["torch"] = torch.__version__
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps({**results, options.mode: report}, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
