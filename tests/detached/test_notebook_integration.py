"""A notebook whose kernel is restarted: a cell attaches to the trainer, whose operator was defined in the notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detached.programs import OPERATOR, ROOT
from tests.helpers.forked import to_lend

pytest.importorskip("jupyter_client")


class Notebook:
    """A kernel, and what the cells that it runs show."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self._manager = KernelManager(connection_file=str(folder / "kernel.json"))
        self._manager.start_kernel(cwd=str(ROOT))
        self._connect()

    def _connect(self) -> None:
        self.client = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def restart(self) -> None:
        """Do what "Restart kernel" does: end its process at once, and start another."""
        self.client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._connect()

    def run(self, source: str) -> str:
        """Run a cell; return its value as it is shown."""
        shown: list[str] = []

        def keep(message: dict) -> None:
            content = message["content"]
            shown.append(content.get("data", {}).get("text/plain", ""))
            shown.extend(content.get("traceback", ()))

        reply = self.client.execute_interactive(source, output_hook=keep, timeout=180)
        assert reply["content"]["status"] == "ok", "\n".join(shown)
        return "".join(shown)

    def end(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    import ray

    for name, value in {**to_lend(), "RAY_ADDRESS": str(ray.get_runtime_context().gcs_address)}.items():
        monkeypatch.setenv(name, value)
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.end()


@pytest.mark.soak  # what it shows beside `test_death_integration.py` is that a class of a notebook travels
def test_a_restarted_kernel_goes_on_with_the_trainer(notebook: Notebook, tmp_path: Path) -> None:
    log = tmp_path / "log"
    notebook.run(OPERATOR)
    before = notebook.run(f"trainer = make({str(log)!r}, 'notebook', config={{'step_s': 0.05}}); pids(trainer)")
    notebook.client.execute("trainer.train()")
    while not log.exists():
        time.sleep(0.01)
    notebook.restart()
    epoch = notebook.run("import os, raysgd; trainer = raysgd.attach('notebook'); trainer.pending().result()['epoch']")
    assert epoch == "1"
    assert notebook.run("trainer.train()['epoch']") == "2"
    assert notebook.run("sorted(trainer.apply_all_workers(os.getpid))") == before
    assert re.match(r"<div|<style|<", notebook.run("trainer._repr_html_()").strip("'\""))
    notebook.run("trainer.shutdown()")
    assert log.read_text().count("train0") == log.read_text().count("train1") == 20
