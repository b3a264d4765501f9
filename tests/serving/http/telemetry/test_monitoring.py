"""The files for Prometheus and Grafana: every query names metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ostinato.serving.http.telemetry.metrics import Metrics
from ostinato.serving.records import EngineStats

FOLDER = Path(__file__).parents[4] / "examples/monitoring"
SUFFIXES = {
    "counter": ["_total"],
    "gauge": [""],
    "histogram": ["_bucket", "_sum", "_count"],
}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of all series, with their labels."""
    metrics = Metrics("tiny", ["/health"])
    metrics.count_answer("/health", 200)
    stats = EngineStats(replays={"FULL": 1}, eager={"TOO_LARGE": 1})
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text(stats).decode()):
        labels = {label for sample in family.samples for label in sample.labels}
        for suffix in SUFFIXES.get(family.type, []):
            names[family.name + suffix] = labels
    # Has no series before the first request.
    names["ostinato:request_success_total"] = {"model_name", "finished_reason"}
    return names


def dashboard() -> dict[str, Any]:
    path = FOLDER / "grafana/dashboards/ostinato.json"
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def queries() -> list[str]:
    board = dashboard()
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return [*exprs, *variables]


def test_every_query_names_what_the_server_exports(exported: dict[str, set[str]]) -> None:
    assert len(queries()) > 30
    for query in queries():
        names = re.findall(r"ostinato:\w+", query)
        assert names, query
        assert set(names) <= set(exported), query
        for labels in re.findall(r"by \(([\w, ]+)\)", query):
            for label in labels.split(", "):
                assert all(label in exported[name] for name in names), query


def test_every_metric_is_on_the_dashboard(exported: dict[str, set[str]]) -> None:
    shown = {name for query in queries() for name in re.findall(r"ostinato:\w+", query)}
    of_histograms = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    missing = {
        name
        for name in exported
        if name not in shown and re.sub(r"_(bucket|sum|count)$", "", name) not in of_histograms
    }
    assert {name for name in missing if not name.endswith("_created")} == set()


def test_panels_have_titles_places_and_a_data_source() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard()["panels"]:
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"


def test_the_other_files_fit_together() -> None:
    scraping = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraping["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    folder = FOLDER / "grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/ostinato.yml").read_text(encoding="utf-8"))
    interval = source["datasources"][0]["jsonData"]["timeInterval"]
    assert interval == scraping["global"]["scrape_interval"]
    provider = yaml.safe_load((folder / "dashboards/ostinato.yml").read_text(encoding="utf-8"))
    assert provider["providers"][0]["type"] == "file"
