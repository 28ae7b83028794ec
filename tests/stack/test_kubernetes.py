"""The objects for Kubernetes are what its API servers and operators take."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # it publishes no types
import kubernetes_validate
import pytest
import yaml

from otel_train.stack import configuration, local
from tests.support.stack import ROOT, program
from tests.support.zero_code import ended_well

pytestmark = pytest.mark.stack

FOLDER = ROOT / "deploy" / "kubernetes"
OUTSIDE = {"PodMonitor", "PrometheusRule", "PyTorchJob"}
"""Kinds of operators; their schemas come with the operators' own modules."""

MIB = 2**20


@cache
def built() -> list[dict[str, Any]]:
    """Everything that `kubectl apply` would get, and the example."""
    command = [program("kustomize"), "build", "--load-restrictor", "LoadRestrictionsNone", str(FOLDER)]
    done = ended_well(command)
    example = (FOLDER / "example" / "pytorchjob.yaml").read_text(encoding="utf-8")
    return [*yaml.safe_load_all(done.stdout), *yaml.safe_load_all(example)]


@cache
def schema(kind: str) -> Any:
    """The schema that an operator's definition has for a kind."""
    path = local.cache_folder() / "crds" / f"{kind.lower()}.yaml"
    assert path.is_file(), f"{path} is missing: run tools/get_components.sh kustomize"
    definition = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    return strict(found)


def strict(node: Any) -> Any:
    """The same schema, where an unknown field is an error. Patterns are left out: they are Go's, not Python's."""
    if isinstance(node, dict):
        inner = {name: strict(value) for name, value in node.items() if name != "pattern"}
        known = isinstance(node.get("properties"), dict) and "additionalProperties" not in node
        if known and not node.get("x-kubernetes-preserve-unknown-fields"):
            inner["additionalProperties"] = False
        return inner
    return [strict(item) for item in node] if isinstance(node, list) else node


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [item for item in built() if item["kind"] == kind]


def test_every_object_fits_its_schema() -> None:
    """Strictly: a field that is in no schema is a typo."""
    kinds = {item["kind"] for item in built()}
    assert (
        kinds >= {"DaemonSet", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy", "Namespace"} | OUTSIDE
    )
    for item in built():
        if item["kind"] in OUTSIDE:
            jsonschema.Draft202012Validator(schema(item["kind"])).validate(item)
        else:
            kubernetes_validate.validate(item, "1.31", strict=True)


def test_no_pod_has_more_than_it_needs() -> None:
    """No root, no privileges, nothing writable but the queue, no token of the API server, bounded memory."""
    for item in [*of_kind("DaemonSet"), *of_kind("StatefulSet")]:
        pod = item["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            version = configuration.settings({})["COLLECTOR_VERSION"]
            assert container["image"] == f"otel/opentelemetry-collector-contrib:{version}"


def test_the_collectors_of_a_cluster_accept_their_configuration(tmp_path: Path) -> None:
    """As the pods get it, with their environment."""
    configs = {item["metadata"]["name"]: item["data"] for item in of_kind("ConfigMap")}
    checked = 0
    for item in [*of_kind("DaemonSet"), *of_kind("StatefulSet")]:
        pod = item["spec"]["template"]["spec"]
        [name] = [volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume]
        path = tmp_path / f"{name}.yaml"
        path.write_text(configs[name]["config.yaml"], encoding="utf-8")
        environ = {
            entry["name"]: entry.get("value", "node-7")  # else Kubernetes sets it: the name of the node
            for entry in pod["containers"][0]["env"]
        }
        assert ("COLLECTOR_NAME" in environ) == (item["kind"] == "DaemonSet")
        ended_well([program("collector"), "validate", f"--config={path}"], environ)
        checked += 1
    assert checked == 2


def test_promtool_accepts_the_rules_as_kubernetes_has_them(tmp_path: Path) -> None:
    """The operator passes `spec` on as a rule file."""
    for item in of_kind("PrometheusRule"):
        path = tmp_path / f"{item['metadata']['name']}.yml"
        path.write_text(yaml.safe_dump(item["spec"]), encoding="utf-8")
        ended_well([program("promtool"), "check", "rules", path])


def test_a_dashboard_fits_into_its_object() -> None:
    """An object may hold a mebibyte."""
    maps = [item for item in of_kind("ConfigMap") if item["metadata"]["name"].startswith("otel-train-")]

    assert maps
    for item in maps:
        assert sum(len(text.encode()) for text in item["data"].values()) < MIB
        assert item["metadata"]["labels"] == {"grafana_dashboard": "1"}
