"""The chart renders what Kubernetes takes, and its parts agree with one another and with the service."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

from archerfish.config import ServeConfig, read_environment
from archerfish.serve import app, processes

from .chart import NAME, ROOT, VARIANTS, of_kind, pods, read_images, render, run_helm, yaml
from .schemas import SCHEMAS

pytestmark = pytest.mark.cluster
jsonschema: Any = pytest.importorskip("jsonschema")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")


def check(manifest: dict[str, Any]) -> None:
    """Raise an error that names what Kubernetes, KEDA or another operator would not take."""
    schema = SCHEMAS.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    else:
        jsonschema.validate(manifest, schema)
    for pod in pods([manifest]):
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        kubernetes_validate.validate(whole, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_are_valid(variant: str) -> None:
    manifests = render(VARIANTS[variant])
    for manifest in manifests:
        check(manifest)
    full = {"ConfigMap", "PersistentVolumeClaim", "PrometheusRule"}
    common = {"full": full, "ray": {*full, "RayService"}}
    kinds = {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    more = {"default": kinds, "full": {*kinds, "ServiceMonitor", "ScaledObject"}, "ray": set()}
    assert {manifest["kind"] for manifest in manifests} == common.get(variant, set()) | more[variant]


def test_wrong_manifests_are_refused() -> None:
    """Red: a validator that takes any key."""
    deployment, scaled = (of_kind(render(VARIANTS["full"]), kind) for kind in ("Deployment", "ScaledObject"))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    scaled["spec"]["minReplicas"] = 1
    for manifest, error in ((deployment, kubernetes_validate.ValidationError), (scaled, jsonschema.ValidationError)):
        with pytest.raises(error):
            check(manifest)


@pytest.mark.parametrize(
    "wrong", ["replicaz=2", "image.name=fish", "drainSeconds=5", "replicas=many", "autoscaling.min=0"]
)
def test_wrong_values_are_refused(wrong: str) -> None:
    done = run_helm("template", NAME, "deploy/helm", "--set", wrong)
    assert done.returncode != 0 and "values don't meet the specifications of the schema" in done.stderr


def test_linters_find_nothing() -> None:
    assert run_helm("lint", "--strict", "deploy/helm").returncode == 0
    hadolint = shutil.which("hadolint") or pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_have_what_they_name(variant: str) -> None:
    """Red: a mount without a volume, a path outside of volumes, a variable that archerfish refuses, links of
    services."""
    manifests = render(VARIANTS[variant])
    named = {one["metadata"]["name"] for one in manifests} | {"kernels", "keys"}
    for pod in (template["spec"] for template in pods(manifests)):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            assert volume.get("configMap", {"name": NAME})["name"] in named
            assert volume.get("persistentVolumeClaim", {"claimName": NAME})["claimName"] in named
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert {mount["name"] for mount in mounts.values()} == volumes.keys()
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            variables = {**read_images()["cpu"].env, **{one["name"]: one.get("value", "") for one in container["env"]}}
            options: dict[str, dict[str, Any]] = {**read_environment(variables)}
            paths = [variables["XDG_CACHE_HOME"], variables["TRITON_CACHE_DIR"], variables["HOME"]]
            files = [variables.get("ARCHERFISH_CONFIG"), options["serve"].get("api_keys_file")]
            for path in (*paths, *filter(None, files)):
                assert any(f"{path}/".startswith(f"{mount}/") for mount in mounts), path
            assert ServeConfig(**options["serve"]).host == "0.0.0.0"
        assert pod["enableServiceLinks"] is False
        assert [str(pod["securityContext"][name]) for name in ("runAsUser", "fsGroup")] == ["10001", "10001"]


def test_dashboard_and_alerts_are_those_of_the_repository() -> None:
    manifests = render(VARIANTS["full"])
    [dashboard] = [one for one in manifests if one["metadata"]["name"] == f"{NAME}-dashboard"]
    assert dashboard["data"]["archerfish.json"] == (ROOT / "deploy" / "grafana" / "archerfish.json").read_text()
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert of_kind(manifests, "PrometheusRule")["spec"] == yaml.safe_load(alerts)
    job = of_kind(manifests, "Service")["metadata"]["labels"][of_kind(manifests, "ServiceMonitor")["spec"]["jobLabel"]]
    assert "archerfish" in job and 'job=~".*archerfish.*"' in alerts


def test_selectors_and_ports_agree() -> None:
    manifests = render(VARIANTS["full"])
    template = pods(manifests)[0]
    labels, [container] = template["metadata"]["labels"], template["spec"]["containers"]
    service, monitor = of_kind(manifests, "Service"), of_kind(manifests, "ServiceMonitor")["spec"]
    [port] = service["spec"]["ports"]
    assert service["spec"]["selector"] == labels == monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert of_kind(manifests, kind)["spec"]["selector"]["matchLabels"] == labels
    policy = of_kind(manifests, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    [opened] = container["ports"]
    probed = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {opened["name"], port["targetPort"], policy["ingress"][0]["ports"][0]["port"], *probed} == {"http"}
    image = read_images()["cpu"]
    assert image.env["ARCHERFISH_SERVE_PORT"] == image.words["EXPOSE"] == str(opened["containerPort"])
    assert monitor["endpoints"][0]["port"] == port["name"]
    deployment = of_kind(manifests, "Deployment")
    assert of_kind(manifests, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]  # an update would undo what KEDA has set
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 2}  # none of cores
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 2}


def test_times_leave_room_for_one_another() -> None:
    """Red: a pod that is killed before its requests have ended, or while archerfish starts its engine process again."""
    spec = pods(render({"startupSeconds": 900, "drainSeconds": 30, "graceSeconds": 100}))[0]["spec"]
    [container] = spec["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert (env["ARCHERFISH_SERVE_DRAIN_S"], env["ARCHERFISH_SERVE_GRACE_S"]) == ("30", "100")
    assert spec["terminationGracePeriodSeconds"] > 130 + processes.KILL_AFTER_S + 2 * processes.LAST_S
    startup, ready, alive = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    lasts = [probe["failureThreshold"] * probe["periodSeconds"] for probe in (startup, ready, alive)]
    assert lasts[0] >= 900 and lasts[1] < 30
    assert lasts[2] > 900 + ServeConfig().hang_s + processes.HostConfig().silence_s
    assert alive["timeoutSeconds"] > app.HEALTH_TIMEOUT_S


def test_images_run_without_root_and_end_with_what_they_run() -> None:
    images = read_images()
    for name in ("cpu", "cuda"):
        image = images[name]
        assert image.words["USER"] == "10001:10001" and image.words["VOLUME"] == '["/models", "/kernels"]'
        assert image.argv("ENTRYPOINT") == ["archerfish"] and image.argv("CMD") == ["serve"]
        assert image.words["COPY"] == f"--from={name}-packages /opt/archerfish /opt/archerfish"
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"archerfish", "constraints.txt", *re.findall(r'"(csrc|CMakeLists.txt|README.md|LICENSE)"', project)}
    assert needed <= set(kept)


def test_ray_gets_the_applications_as_they_are_and_a_token() -> None:
    manifests = render(VARIANTS["ray"])
    ray = of_kind(manifests, "RayService")["spec"]
    assert yaml.safe_load(ray["serveConfigV2"]) == {"applications": [{"name": "fish"}]}
    assert ray["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert pods(manifests)[1]["spec"]["containers"][0]["readinessProbe"]["httpGet"] == {
        "path": "/ready",
        "port": "http",
    }
    assert "--set-file" in run_helm("template", NAME, "deploy/helm", "--set", "ray.enabled=true").stderr
