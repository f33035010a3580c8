"""The files in docker/: what they name exists, and containers run as they should.

Their schemas come with `pip install check-jsonschema kubernetes-validate`, for no other test.
"""

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from announcements import MODEL, NOW, make_announcement
from container_files import (
    DOCKER,
    list_alerts,
    list_kubernetes,
    list_panel_queries,
    list_panel_targets,
    name_labels,
    name_metrics,
    read_yaml,
)
from operated_figures import make_figures, make_run_figures
from prometheus_client.parser import text_string_to_metric_families
from watched_swarms import read

from shoal.cli.commands import serve
from shoal.cli.monitoring import monitor
from shoal.client.monitor.canary import CanaryHop, CanaryRun, CanaryState
from shoal.client.monitor.description import describe, describe_canaries
from shoal.client.monitor.page.metrics import write_metrics as write_swarm_metrics
from shoal.peer.operating.figures import Replicas
from shoal.peer.operating.metrics import MEASURED
from shoal.peer.operating.metrics import write_metrics as write_peer_metrics
from shoal.protocol.ids import PeerId
from shoal.protocol.records.announcements import TrainingProgress

ROOT = Path(__file__).resolve().parents[1]
RUNBOOK = ROOT / "docs" / "operate.md"

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""

LABELS_OF_PROMETHEUS = {"instance", "job"}
"""Labels that it adds to all of them."""


CHECKS = {
    "compose.yaml": ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
    "kubernetes/peers.yaml": ["kubernetes-validate", "--strict"],
    "kubernetes/monitor.yaml": ["kubernetes-validate", "--strict"],
}
"""What checks a file by the schema of the program that reads it."""


def list_served_metrics() -> dict[str, set[str]]:
    """Return what a peer and a monitor with a canary serve, each metric with its labels."""
    figures = replace(make_figures(), replicas=Replicas(1, 2), measured=dict.fromkeys(MEASURED, 1))
    hop = CanaryHop(PeerId("12D3Koo"), "0:4", 0.001, 0.02, 0.003)
    run = CanaryRun(NOW, MODEL, "", 0.5, 9.0, "text", (hop,))
    described = replace(
        describe(read(make_announcement(1, training=TrainingProgress(1, 2, 3.0, 4.0))), NOW),
        canaries=describe_canaries([CanaryState("a", "text", run, 1)], NOW),
    )
    served: dict[str, set[str]] = {}
    for text in (
        write_peer_metrics(figures, make_run_figures()),
        write_swarm_metrics(described, {}),
    ):
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                served.setdefault(sample.name, set()).update(sample.labels)
    return served


def list_commands() -> Iterator[list[str]]:
    """Yield the words of each command of shoal, without `shoal`."""
    for service in read_yaml("compose.yaml")["services"].values():
        if service["image"].startswith("shoal") and "command" in service:
            program, *words = service.get("entrypoint", ["shoal"])
            yield (words if program == "shoal" else []) + service["command"]
    for one in list_kubernetes():
        if "replicas" in one["spec"]:
            yield one["spec"]["template"]["spec"]["containers"][0]["args"]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    {"serve": serve, "monitor": monitor}[words[0]].add_arguments(parser)
    return parser.parse_args(words[1:])


def test_alerts_and_dashboard_read_metrics_that_are_served() -> None:
    queries = [alert["expr"] for alert in list_alerts()] + list_panel_queries()

    named = set[str]().union(*map(name_metrics, queries))

    assert all(map(name_metrics, queries))
    assert named - OF_PROMETHEUS <= list_served_metrics().keys()


def test_queries_and_their_texts_use_labels_that_are_served() -> None:
    served = list_served_metrics()
    of_alerts = [
        (alert["expr"], set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])))
        for alert in list_alerts()
    ]
    of_panels = [
        (target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])))
        for target in list_panel_targets()
    ]
    unknown = dict[str, set[str]]()
    for query, shown in of_alerts + of_panels:
        known = LABELS_OF_PROMETHEUS.union(*(served.get(one, ()) for one in name_metrics(query)))
        selecting, grouping = name_labels(query)
        unknown[query] = (selecting | grouping) - known
        unknown[query] |= shown - (grouping or known)  # of a group no other labels are left

    assert not {query: labels for query, labels in unknown.items() if labels}


def test_alerts_have_a_runbook() -> None:
    alerts = list_alerts()
    text = RUNBOOK.read_text(encoding="utf-8")

    assert len(alerts) == 11
    for alert in alerts:
        assert alert["annotations"]["runbook"] == "docs/operate.md#what-to-do-at-each-alert"
        assert f"`{alert['alert']}`" in text
    assert "## What to do at each alert" in text


def test_containers_run_commands_that_exist() -> None:
    commands = list(list_commands())

    parsed = [parse(words) for words in commands]  # ends the process where one is wrong

    drains = [options.drain for options in parsed if "drain" in options]
    assert (len(parsed), len(drains)) == (7, 5)
    assert max(drains) < 60
    names = [options.name for options in parsed if "name" in options]
    assert len(set(names)) == len(names)


def test_containers_may_write_to_volumes_only() -> None:
    for name, service in read_yaml("compose.yaml")["services"].items():
        assert service["read_only"], name
    pods = [
        one["spec"]["template"]["spec"] for one in list_kubernetes() if "replicas" in one["spec"]
    ]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
    assert len(pods) == 2


@pytest.mark.parametrize("name", CHECKS)
def test_files_fit_their_schemas_and_one_with_a_mistake_does_not(name: str, tmp_path: Path) -> None:
    if shutil.which(CHECKS[name][0]) is None:
        pytest.skip(f"needs {CHECKS[name][0]}")
    text = (DOCKER / name).read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(re.sub(r"(volumes|accessModes|maxUnavailable):", r"\1s:", text))

    codes = [
        subprocess.run([*CHECKS[name], str(path)], capture_output=True, timeout=60).returncode
        for path in (DOCKER / name, wrong)
    ]

    assert codes == [0, 1]


@pytest.mark.parametrize(
    ("script", "words", "programs", "expected"),
    [
        ("make_base_image.sh", [], {}, "give the name of the image to make"),
        ("make_base_image.sh", ["base"], {"mmdebstrap": None}, "no mmdebstrap; on Debian:"),
        (
            "make_base_image.sh",
            ["base"],
            {"apt-get": "true"},
            "apt has no lists of Debian bookworm",
        ),
        ("make_base_image.sh", ["base"], {"id": "echo 1000", "buildah": "false"}, "user namespace"),
        (
            "make_base_image.sh",
            ["base"],
            {"mmdebstrap": "exit 1"},
            "could not make Debian bookworm",
        ),
        ("make_base_image.sh", ["base"], {"buildah": "exit 1"}, "could not store the image base"),
        ("run_swarm.sh", [], {}, "give a command of podman-compose"),
        ("run_swarm.sh", ["up"], {"runc": None}, "no runc; on Debian:"),
        ("run_swarm.sh", ["up"], {"podman": "false"}, "first: make images-from-debian"),
    ],
)
def test_scripts_say_why_they_fail_and_leave_nothing_behind(
    script: str,
    words: list[str],
    programs: dict[str, str | None],
    expected: str,
    tmp_path: Path,
) -> None:
    """Every program that they need is a stand-in, in the only folder that is searched."""
    working = dict.fromkeys(
        ("buildah", "mmdebstrap", "newuidmap", "podman", "podman-compose", "runc"), "true"
    )
    working |= {"apt-get": "echo deb file:/debian bookworm main", "id": "echo 0"}
    searched, temporary = tmp_path / "bin", tmp_path / "tmp"
    searched.mkdir()
    temporary.mkdir()
    for name in ("dirname", "grep", "mktemp", "rm", "sed", "sort"):
        (searched / name).symlink_to(shutil.which(name) or name)
    for name, command in (working | programs).items():
        if command is not None:
            (searched / name).write_text(f"#!/bin/sh\n{command}\n")
            (searched / name).chmod(0o755)

    ended = subprocess.run(
        ["/bin/sh", str(DOCKER / script), *words],
        env={"PATH": str(searched), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{script}: ")
    assert expected in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not any(temporary.iterdir())
