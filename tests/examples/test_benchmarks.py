"""Every benchmark runs from beginning to end, and what it says can be trusted to mean what it says."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples.conftest import FOLDER
from tests.helpers.run_if import num_gpus

KEYS = {
    "benchmark",
    "smoke_test",
    "num_workers",
    "repetitions",
    "machine",
    "peers",
    "results",
    "targets",
}
FIGURES = {
    "async_validation": {"stall_s", "slower_step_s", "beside_to_inline", "sleeping_run", "computing_run"},
    "callback_cost": {"none_us", "worker_callback_us", "driver_callback_us", "journal_us", "ledger_us", "step_us"},
    "compare_cost": {"compare_ms", "step_ms", "share"},
    "throughput": {"paired_relative_speed", "added_us_per_step", "step_us"},
    "determinism": {"steps_per_s", "paired_ratio", "num_digests"},
    "epoch_cost": {"epoch_ms", "loop_ms"},
    "frozen_base": {"state_mib", "file_mib", "save_ms", "step_in_s", "load_s", "digest_s"},
    "goodput": {"goodput", "kills", "samples_lost", "samples_twice", "again"},
    "gpu_recovery": {"recovery_s", "notice_s", "new_group_s", "first_step_s", "step_s", "relative_speed", "copy_ms"},
    "gpu_throughput": {"paired_relative_speed", "samples_per_s", "peak_mib", "waits_per_epoch"},
    "handover": {"handover_s"},
    "long_run": {"cpu_ms", "written_kib", "size_mib"},
    "order": {"open_s", "memory_mib", "batch_of_32_us", "batch_of_1024_us"},
    "population": {"copy_s", "gap_s", "new_trial_s"},
    "predict": {"batch_ms", "paired_share"},
    "ray_data": {"batch_ms"},
    "reload": {"edit_s", "setup_s", "update_s", "step_s"},
    "scale": {"call_ms", "signs_share", "recovery_s", "full_size_s"},
    "recovery": {"recovery_s", "batches_again", "snapshot_cost_s"},
    "function_api": {"to_callback_s", "cycle_s", "stall_s", "recovery_s"},
    "fit": {"startup_s", "report_s", "to_driver_s", "folder_s", "dict_s", "recovery_s"},
    "small_sums": {"sum_us"},
    "streams": {"epoch_s", "open_s", "open_mib", "lost", "repeated", "lost_resized", "repeated_resized"},
    "startup": {"after_init_s", "ray_init_s", "from_process_start_s"},
    "tf_throughput": {"images_per_s", "first_step_s", "recovery_s"},
    "snapshot_cost": {"call_ms", "copy_ms", "snapshot_ms", "share_of_time"},
    "undo_cost": {"step_ms", "added_ms", "first_batch_ms"},
    "checkpoint": {
        "stall_ms",
        "next_train_delay_ms",
        "complete_ms",
        "load_ms",
        "torch_load_ms",
        "copy_ms",
        "apply_and_save_ms",
    },
}


@pytest.fixture
def common(benchmark: Any) -> Any:
    """The module that the benchmarks share."""
    return benchmark("_common")


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For the temporary files of a benchmark, Ray's included, whose sockets need a short path."""
    path = tempfile.mkdtemp(prefix="b-")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run(script: str, short_folder: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Runs a benchmark; returns what it printed for people, and the JSON line."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py"), "--smoke-test", *arguments],
        env={**os.environ, "TMPDIR": short_folder, "RAY_TMPDIR": short_folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *text, last = done.stdout.splitlines()
    return "\n".join(text), json.loads(last)


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.parametrize("script", sorted(FIGURES))
def test_a_smoke_test_ends_well_and_reports_all_figures(script: str, short_folder: str) -> None:
    text, result = run(script, short_folder, *(["--peers", "raw"] if script == "epoch_cost" else []))
    assert result.keys() == KEYS
    assert result["benchmark"] == script
    assert result["smoke_test"] is True
    assert {entry["figure"] for entry in result["results"]} >= FIGURES[script]
    assert all(entry.keys() >= {"contender", "figure", "value"} for entry in result["results"])
    assert {name for name, status in result["peers"].items() if status != "not selected"} == (
        {"raw"} if script == "epoch_cost" else set()
    )
    assert result["targets"]
    assert all(target["met"] is None for target in result["targets"]), "a smoke test measures nothing"
    assert "| --" in text
    if script == "epoch_cost":
        measured = {entry["contender"] for entry in result["results"] if entry["figure"] == "epoch_ms"}
        assert measured == {"raysgd", "raw"}


def test_the_interval_brackets_the_median_and_narrows_with_more_samples(common: ModuleType) -> None:
    few, many = common.estimate([1.0, 2.0, 9.0]), common.estimate([1.0, 2.0, 9.0] * 30)
    assert few.median == many.median == 2.0
    assert few.low <= 2.0 <= few.high
    assert (few.count, many.count) == (3, 90)
    assert many.high - many.low < few.high - few.low


@pytest.mark.parametrize(
    ("is_upper", "measured", "met"),
    [(True, 4.0, True), (True, 4.1, False), (False, 4.0, True), (False, 3.9, False), (True, None, None)],
)
def test_a_target_is_met_at_its_bound_and_unknown_without_a_figure(
    common: ModuleType, is_upper: bool, measured: float | None, met: bool | None
) -> None:
    assert common.Target("ms", 4.0, is_upper, measured).met is met


def report(common: ModuleType) -> Any:
    arguments = argparse.Namespace(smoke_test=False, num_workers=2, repetitions=2)
    return common.Report("trial", arguments, common.Peers(("peer",), {}, ()))


def test_contenders_take_turns_and_a_peer_that_fails_is_left_out(
    common: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    def own() -> int:
        order.append("raysgd")
        return 1

    def peer() -> int:
        order.append("peer")
        if order.count("peer") == 2:
            raise common.JobError("it broke")
        return 2

    found = common.take_turns({"raysgd": own, "peer": peer}, 3, report(common))
    assert order == ["raysgd", "peer", "raysgd", "peer", "raysgd"]
    assert found == {"raysgd": [1, 1, 1]}
    assert "it broke" in capsys.readouterr().out


def test_a_job_that_takes_too_long_is_ended(common: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(common.JobError, match="ended after"):
        common.run_job(str(script), "role", timeout_s=0.5)


@pytest.mark.integration
@pytest.mark.skipif(num_gpus() > 0, reason="it runs where there is a GPU")
@pytest.mark.parametrize("name", ["gpu_throughput.py", "gpu_recovery.py"])
def test_a_benchmark_for_gpus_says_what_it_needs(name: str, short_folder: str) -> None:
    script = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "needs an NVIDIA GPU and a PyTorch that sees it" in done.stdout
