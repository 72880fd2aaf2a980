"""The Kubernetes manifests of examples/kuberay: valid by the schemas of Kubernetes and of Ray Serve, and consistent.

KubeRay's and the Prometheus operator's own definitions are in no package: of these objects the fields are compared with
lists, and what is Kubernetes' inside them (pod templates) with its schema.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from ray.serve.schema import ServeDeploySchema

from rekindle.config import Settings

FOLDER = Path(__file__).parents[2] / "examples" / "kuberay"
DOCUMENTS = [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
OBJECTS = {each["kind"]: each for each in DOCUMENTS}
VERSIONS = ("1.30", "1.37")  # of Kubernetes
KUBERAY = {
    "spec": {"serveConfigV2", "rayClusterConfig"},
    "rayClusterConfig": {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def templates() -> dict[str, dict[str, Any]]:
    """The pod template of the head, and of the workers."""
    cluster = OBJECTS["RayService"]["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"], "worker": workers["template"]}


def as_object(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_kubernetes_own_is_valid(version: str) -> None:
    assert sorted(each["kind"] for each in DOCUMENTS) == ["PersistentVolumeClaim", "PodMonitor", "RayService", "Secret"]
    for each in (OBJECTS["Secret"], OBJECTS["PersistentVolumeClaim"], *map(as_object, templates().values())):
        validate(each, version, strict=True)


def test_a_mistake_in_a_pod_is_found() -> None:
    template = deepcopy(templates()["worker"])
    template["spec"]["containers"][0]["volumeMount"] = template["spec"]["containers"][0].pop("volumeMounts")
    with pytest.raises(ValidationError, match="'volumeMount' was unexpected"):
        validate(as_object(template), VERSIONS[0], strict=True)


def test_the_fields_of_kuberay_are_known() -> None:
    service = OBJECTS["RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    found = {"spec": service["spec"], "rayClusterConfig": cluster, "headGroupSpec": cluster["headGroupSpec"]}
    (found["workerGroupSpecs"],) = cluster["workerGroupSpecs"]
    assert service["apiVersion"] == "ray.io/v1" and {name: set(fields) for name, fields in found.items()} == KUBERAY
    for group in (found["headGroupSpec"], found["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_what_ray_serve_deploys_is_valid() -> None:
    config = ServeDeploySchema(**yaml.safe_load(OBJECTS["RayService"]["spec"]["serveConfigV2"]))
    (application,) = config.applications
    (worker,) = templates()["worker"]["spec"]["containers"]
    settings = Settings.load(application.args, {"REKINDLE_SECRET": "s" * 16, "REKINDLE_API_KEY": "key-of-a-caller"})
    assert settings.server.port in {each["containerPort"] for each in worker["ports"]}
    mounted = {each["mountPath"] for each in worker["volumeMounts"]}
    assert str(settings.store.directory()) in mounted and str(Path(str(settings.model.model)).parent) in mounted
    (deployment,) = application.deployments
    assert deployment.name == "Rekindle" and deployment.max_replicas_per_node == 1
    assert deployment.ray_actor_options.num_cpus < int(worker["resources"]["limits"]["cpu"])
    (workers,) = OBJECTS["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert deployment.autoscaling_config["max_replicas"] == workers["maxReplicas"]


def test_what_objects_name_is_there() -> None:
    secret, (worker,) = OBJECTS["Secret"], templates()["worker"]["spec"]["containers"]
    endpoints = OBJECTS["PodMonitor"]["spec"]["podMetricsEndpoints"]
    asked = [each["authorization"]["credentials"] for each in endpoints if "authorization" in each]
    asked += [each["valueFrom"]["secretKeyRef"] for each in worker["env"] if "valueFrom" in each]
    assert len(asked) == 3
    assert all(each["name"] == secret["metadata"]["name"] and each["key"] in secret["stringData"] for each in asked)
    assert {each["port"] for each in endpoints} <= {each["name"] for each in worker["ports"]}
    volumes = templates()["worker"]["spec"]["volumes"]
    assert {each["name"] for each in worker["volumeMounts"]} == {each["name"] for each in volumes}
    claimed = [each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each]
    assert claimed == [OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]]
