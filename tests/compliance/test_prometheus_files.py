"""The alert rules and the dashboard's queries as Prometheus' own promtool reads them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "prometheus"
FETCHED = ROOT / ".venv-compliance" / "prometheus" / "usr" / "bin"
"""Where `make compliance` unpacks Debian's package, where none is installed."""


def promtool() -> str:
    found = shutil.which("promtool", path=f"{os.environ['PATH']}{os.pathsep}{FETCHED}")
    assert found, "promtool is neither installed nor fetched; it belongs to Prometheus"
    return found


def check(rules: Path) -> None:
    done = subprocess.run(
        [promtool(), "check", "rules", str(rules)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_rules() -> None:
    check(FOLDER / "alerts.yaml")


def test_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert queries
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.json"
    # JSON is YAML.
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    check(file)
