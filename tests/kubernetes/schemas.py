"""Schemas of the resources that are not Kubernetes' own, as far as the chart uses them: other keys are refused.

Written after the definitions of KEDA 2.17, the Prometheus operator 0.80 and KubeRay 1.5.1.
"""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
WHOLE = {"type": "integer", "minimum": 0}
YES_OR_NO = {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANY = {"type": "object"}


def record(needed: str = "", **members: Any) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": needed.split(), "additionalProperties": False}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def resource(version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = record("name", name=TEXT, labels=TEXTS)
    return record(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind=TEXT, metadata=metadata, spec=spec
    )


POLICY = record("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=WHOLE, periodSeconds=WHOLE)
RULES = record(stabilizationWindowSeconds=WHOLE, policies=several(POLICY), selectPolicy=TEXT)
TRIGGER = record(
    "type metadata",
    type={"const": "prometheus"},
    name=TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=record("serverAddress query threshold", serverAddress=TEXT, query=TEXT, threshold=TEXT),
)
SCALED_OBJECT = record(
    "scaleTargetRef triggers",
    scaleTargetRef=record("name", name=TEXT, kind=TEXT),
    minReplicaCount=WHOLE,
    maxReplicaCount=WHOLE,
    pollingInterval=WHOLE,
    cooldownPeriod=WHOLE,
    triggers=several(TRIGGER),
    fallback=record(
        "failureThreshold replicas",
        failureThreshold=WHOLE,
        replicas=WHOLE,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=record(horizontalPodAutoscalerConfig=record(behavior=record(scaleUp=RULES, scaleDown=RULES))),
)
ENDPOINT = record(
    port=TEXT,
    path=TEXT,
    interval=TEXT,
    authorization=record(type=TEXT, credentials=record("name key", name=TEXT, key=TEXT)),
)
ALERT = record("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": TEXT})
RULE_GROUPS = record("groups", groups=several(record("name rules", name=TEXT, rules=several(ALERT))))
SERVICE_MONITOR = record(
    "selector endpoints", jobLabel=TEXT, selector=record(matchLabels=TEXTS), endpoints=several(ENDPOINT)
)
GROUP = {"rayStartParams": TEXTS, "template": record("spec", metadata=ANY, spec=ANY)}
WORKERS = record("groupName template", **GROUP, groupName=TEXT, replicas=WHOLE, minReplicas=WHOLE, maxReplicas=WHOLE)
CLUSTER = record(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=YES_OR_NO,
    authOptions=record(mode=TEXT),
    headGroupSpec=record("template rayStartParams", **GROUP),
    workerGroupSpecs=several(WORKERS),
)
SCHEMAS = {
    "ScaledObject": resource("keda.sh/v1alpha1", SCALED_OBJECT),
    "ServiceMonitor": resource("monitoring.coreos.com/v1", SERVICE_MONITOR),
    "PrometheusRule": resource("monitoring.coreos.com/v1", RULE_GROUPS),
    "RayService": resource("ray.io/v1", record("rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER)),
}
