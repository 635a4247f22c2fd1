"""benchmarks/results/integrations.json is there, nothing in it failed, and docs/integrations.md names its versions."""

from __future__ import annotations

import json
import re

from tests.integrations.launching import ROOT

RECORD = json.loads((ROOT / "benchmarks" / "results" / "integrations.json").read_text())
PAGE = (ROOT / "docs" / "integrations.md").read_text()


def test_what_is_recorded_has_passed():
    for file, entry in RECORD.items():
        assert (ROOT / "tests" / "integrations" / file).exists()
        assert entry["passed"] == len(entry["cases"]) > 0 == entry["failed"] + entry["error"] + entry["skipped"], file


def test_the_page_names_the_versions_that_were_run():
    rows = [line.split("|")[-2] for line in PAGE.splitlines() if line.startswith("| ") and "`make test" in line]
    rows += [line.split("|")[-2] for line in PAGE.splitlines() if line.startswith("| ") and "by hand" in line]
    named = dict(re.findall(r"([a-z-]+) (\d+\.\d+\.\d+)", " ".join(rows)))
    assert len(named) > 12
    for entry in RECORD.values():
        assert named.items() <= {**named, **entry["versions"]}.items()
    assert named.keys() <= {name for entry in RECORD.values() for name in entry["versions"]}
