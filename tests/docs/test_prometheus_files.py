"""The alert rules and the dashboard ask for metrics, labels and label values that a node really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from swarmllm.node.metric_definitions import DEFINITIONS

FOLDER = Path(__file__).parents[2] / "docs" / "prometheus"
SERIES = {item.name: set(item.labels) for item in DEFINITIONS if item.kind != "histogram"}
SERIES |= {
    f"{item.name}_{part}": set(item.labels) | ({"le"} if part == "bucket" else set())
    for item in DEFINITIONS
    if item.kind == "histogram"
    for part in ("bucket", "sum", "count")
}
OF_PROMETHEUS = {"up": set[str]()}
TARGET_LABELS = {"job", "instance"}


def expressions() -> list[str]:
    rules = (FOLDER / "alerts.yaml").read_text("utf-8")
    found = re.findall(r"^ +expr: (?:\|\n)?((?:.|\n(?! +(?:for|labels):))*)", rules, re.MULTILINE)
    assert len(found) == rules.count("- alert: ")
    dashboard = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
    found += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return found


@pytest.mark.parametrize("expression", expressions())
def test_every_series_is_one_that_a_node_exports_with_these_labels(expression: str) -> None:
    known = SERIES | OF_PROMETHEUS
    used = re.findall(r"\b(up|(?:swarmllm|process|gen_ai)_\w+)\b(?:\{([^}]*)\})?", expression)
    assert used, expression
    labels = set(re.findall(r"(?:by|on) \(([^)]*)\)", expression))
    grouped = {label.strip() for group in labels for label in group.split(",")}
    for name, selector in used:
        assert name in known, name
        matched = set(re.findall(r"(\w+)=~?\"", selector))
        assert matched <= known[name] | TARGET_LABELS, (name, matched)
    every = {label for name, _ in used for label in known[name]} | TARGET_LABELS
    assert grouped <= every, (grouped, expression)
