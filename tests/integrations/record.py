"""Runs tests of this folder, `whole` ones too, and notes what came of them with the versions they ran with.

    python -m tests.integrations.record test_ray.py test_trl.py --out benchmarks/results/integrations.json

The file has one entry per test file; a run replaces those that it names. Figures that a test tells, as JSON by
record_property, stand beside its outcome.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.integrations.launching import ROOT

PACKAGES = (
    "accelerate", "bitsandbytes", "datasets", "diffusers", "lightning", "peft", "ray", "schedulefree",
    "sentence-transformers", "tensorboard", "timm", "torch", "torchao", "torchmetrics", "torchvision", "tqdm",
    "transformers", "trl", "wandb",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def outcome(case: ElementTree.Element) -> str:
    kinds = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
    return {"failure": "failed", "error": "error", "skipped": "skipped"}[kinds[0]] if kinds else "passed"


def figures(case: ElementTree.Element) -> dict[str, Any]:
    """What a test has said by record_property."""
    found = {str(each.get("name")): str(each.get("value")) for each in case.iter("property")}
    return {name: json.loads(value) for name, value in found.items()}


def tried(file: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = f"{folder}/report.xml"
        asked = ["-m", "pytest", "-m", "", f"tests/integrations/{file}", f"--junitxml={report}"]
        subprocess.run([sys.executable, *asked], cwd=ROOT, check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
    cases = {str(case.get("name")): outcome(case) for case in suite.iter("testcase")}
    counts = {kind: list(cases.values()).count(kind) for kind in ("passed", "failed", "error", "skipped")}
    command = f'python -m pytest -m "" tests/integrations/{file}'
    seconds = round(float(suite.get("time", "0")))
    entry = {"command": command, **counts, "seconds": seconds, "versions": versions(), "cases": cases}
    told = {str(case.get("name")): found for case in suite.iter("testcase") if (found := figures(case))}
    return entry | ({"figures": told} if told else {})


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("files", nargs="+")
    asked.add_argument("--out", type=Path, required=True)
    options = asked.parse_args()
    for file in options.files:
        entry = tried(file)
        found = json.loads(options.out.read_text()) if options.out.exists() else {}  # now: others may have written
        options.out.write_text(json.dumps(dict(sorted({**found, file: entry}.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
