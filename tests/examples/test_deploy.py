"""The files for clusters: they can be read, and say what the rest of the project says."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
GAUGES = (ROOT / "raysgd" / "core" / "history" / "status.py").read_text(encoding="utf-8")


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def exported() -> set[str]:
    """The metrics that a trainer exports."""
    return {
        node.value
        for node in ast.walk(ast.parse(GAUGES))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"raysgd_\w+", node.value)
    }


def test_the_cluster_and_the_job_have_what_ray_needs() -> None:
    cluster = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    assert cluster["head_node_type"] in cluster["available_node_types"]
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize("name", ["cluster.yaml", "rayjob.yaml", "Dockerfile"])
def test_versions_are_those_of_the_tests(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert pinned("ray") in text
    assert set(re.findall(r"torch==([\d.]+)", text)) <= {pinned("torch")}


def copied(folder: Path) -> list[Path]:
    """Copies the program of the image into a folder, as the Dockerfile does; returns the files."""
    pairs = re.findall(r"^COPY (\S+) /app/(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return [shutil.copy(ROOT / source, folder / target) for source, target in pairs]


@pytest.mark.program
def test_the_program_of_the_image_runs_with_the_arguments_of_the_job(tmp_path: Path) -> None:
    copied(tmp_path)
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    [python, *arguments] = shlex.split(job["spec"]["entrypoint"])
    assert (python, "--use-gpu" in arguments) == ("python", True)
    arguments.remove("--use-gpu")
    command = [sys.executable, *arguments, "--num-workers", "1", "--smoke-test"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "accuracy on held-out digits" in done.stdout, done.stderr


def test_the_image_has_what_its_program_imports(tmp_path: Path) -> None:
    files = copied(tmp_path)
    nodes = [node for file in files for node in ast.walk(ast.parse(Path(file).read_text()))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    names = {name.partition(".")[0] for name in imported} - {Path(file).stem for file in files}
    text = (DEPLOY / "Dockerfile").read_text()
    installed = {"raysgd", "numpy"} | {name for name in ("ray", "torch") if f'"{name}' in text}
    installed |= {"sklearn"} if "scikit-learn" in text else set()
    assert sorted(names - installed - set(sys.stdlib_module_names)) == []
    assert "progress" in text, "it shows a bar"


def test_what_the_job_declares_is_used() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    [group] = cluster["workerGroupSpecs"]
    for pod in (cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] or group["minReplicas"] == group["maxReplicas"]


def test_the_script_for_slurm_is_valid_bash() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n", str(DEPLOY / "train.sbatch")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    text = (DEPLOY / "train.sbatch").read_text()
    assert text.index("export SRUN_CPUS_PER_TASK") < text.index("srun "), "newer versions give a step one CPU otherwise"


class _Metadata(BaseHTTPRequestHandler):
    """The service of AWS on a machine that will be taken away, which says so the third time that it is asked."""

    answers = iter([404, 404, 200])

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._answer(200, "secret")

    def do_GET(self) -> None:
        assert self.path == "/latest/meta-data/spot/instance-action"
        is_allowed = self.headers["X-aws-ec2-metadata-token"] == "secret"
        self._answer(next(self.answers) if is_allowed else 401, '{"action": "terminate"}')

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_ray_is_told_when_a_spot_machine_will_be_taken_away(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/bash\necho "$@"\n')
    ray.chmod(0o755)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        service = f"http://127.0.0.1:{server.server_port}"
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "METADATA_SERVICE": service, "POLL_S": "0.01"}
        command = ["bash", str(DEPLOY / "spot-notice.sh")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "drain-node --reason DRAIN_NODE_REASON_PREEMPTION" in done.stdout
    [said] = [line for line in (ROOT / "docs" / "deploy.md").read_text().splitlines() if "ray drain-node" in line]
    assert said.strip() == (DEPLOY / "spot-notice.sh").read_text().splitlines()[-1]


def test_rules_and_the_dashboard_ask_for_metrics_that_there_are() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    found = {name for text in asked for name in re.findall(r"ray_(raysgd_\w+)", text)}
    assert found <= exported()
    assert len(rules) >= 4
    assert len(panels) >= 6


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    ends = {True: "", False: "`"}  # a name that ends with an underscore begins those of a family, one for each bin
    assert [name for name in sorted(exported()) if f"`{name}{ends[name.endswith('_')]}" not in page] == []


def test_every_environment_variable_is_on_its_page() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "raysgd").rglob("*.py") if "examples" not in path.parts
    )
    pattern = r'"((?:RAYSGD|TRAIN|NCCL)_[A-Z_]+|SGD_[A-Z_]+_S|RAY_CHDIR\w+|TF_CONFIG)"'
    keys = {"TRAIN_DATASET_KEY", "TRAIN_CHECKPOINT_SUBDIR"}
    assert sorted(name for name in set(re.findall(pattern, sources)) - keys if f"`{name}`" not in page) == []
