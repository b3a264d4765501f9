"""The Dockerfile and the Kubernetes example: their options, ports, paths and names are real."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from ostinato import AsyncLLM, cli
from ostinato.serving.http.access import OPEN_PATHS
from ostinato.serving.http.app import create_app
from ostinato.serving.http.server_config import ServerConfig

ROOT = Path(__file__).parents[3]
DEFAULTS = ServerConfig()


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Its instructions."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (each.partition(" ") for each in joined.split("\n"))]


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Those of the Kubernetes example, by kind."""
    text = (ROOT / "examples/kubernetes/ostinato.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What the command line reads; raises for what it does not know."""
    command = get_command(cli.app)
    name, *rest = arguments
    context = command.make_context("ostinato", [name, *rest], resilient_parsing=True)
    _, found, rest = command.resolve_command(context, arguments)  # type: ignore[attr-defined]
    return dict(found.make_context(name, rest, parent=context).params)


def of(dockerfile: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for each, rest in dockerfile if each == name]


def test_the_image_runs_the_server(dockerfile: list[tuple[str, str]]) -> None:
    assert of(dockerfile, "EXPOSE") == [str(DEFAULTS.port)]
    assert json.loads(of(dockerfile, "ENTRYPOINT")[0]) == ["ostinato"]
    assert parsed(json.loads(of(dockerfile, "CMD")[0]))["host"] == "0.0.0.0"
    assert of(dockerfile, "USER") == ["ostinato"]
    (check,) = of(dockerfile, "HEALTHCHECK")
    assert f"127.0.0.1:{DEFAULTS.port}/health" in check
    json.loads(check.partition("CMD ")[2])


def test_the_image_has_what_it_installs(dockerfile: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = " ".join(of(dockerfile, "RUN"))
    (torch,) = re.findall(r"torch==(\d+\.\d+)", commands)
    assert project["dependencies"][0].startswith(f"torch>={torch},"), "the one with Triton 3.6"
    (extras,) = re.findall(r"'\.\[(.*?)\]'", commands)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    included = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for copied in of(dockerfile, "COPY"):
        for name in shlex.split(copied)[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in included


def test_the_pod_is_asked_where_the_server_answers(
    objects: dict[str, Any], engine: AsyncLLM
) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parsed(container["args"])
    (port,) = container["ports"]
    assert port["containerPort"] == options["port"]
    assert options["host"] == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] > options["shutdown_timeout_s"]
    routes = create_app(engine, DEFAULTS).openapi()["paths"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert "get" in routes[asked["path"]]
        assert asked["path"] in OPEN_PATHS  # kubelet has no key


def test_the_names_of_the_objects_fit(
    objects: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    spec = objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    (service_port,) = objects["Service"]["spec"]["ports"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["selector"]["matchLabels"] == labels == objects["Service"]["spec"]["selector"]
    assert service_port["targetPort"] == container["ports"][0]["name"]
    volumes = {each["name"]: each for each in spec["template"]["spec"]["volumes"]}
    assert set(volumes) == {each["name"] for each in container["volumeMounts"]}
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert of(dockerfile, "VOLUME") == [container["volumeMounts"][0]["mountPath"]]
    assert [each["name"] for each in container["env"]] == ["OSTINATO_API_KEY"]
    assert str(spec["template"]["spec"]["securityContext"]["runAsUser"]) in " ".join(
        of(dockerfile, "RUN")
    )
