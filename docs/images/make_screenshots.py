"""Makes the pictures of these pages from a real small run: `python docs/images/make_screenshots.py`.

Needs the extra `dev`, `pip install pyte pillow`, and chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image, ImageChops
from terminal import as_html, screen_of

HERE = Path(__file__).resolve().parent
MOST_BYTES = 150_000
NOTEBOOK = """
import sys
sys.path.insert(0, {here!r})
from digits_run import Digits
from raysgd import TorchTrainer
from raysgd.callbacks import LearningRateMonitor, ProgressBar
from raysgd.utils import BATCH_SIZE

config = {{"lr": 0.003, BATCH_SIZE: 8, "seed": 0}}
trainer = TorchTrainer(training_operator_cls=Digits, config=config, use_local=True, scheduler_step_freq="epoch")
history = trainer.fit(8, callbacks=[LearningRateMonitor(), ProgressBar()])
"""


def photograph(page: Path, name: str, width: int, height: int, *, is_dark: bool = False, is_page: bool = False) -> None:
    """Writes a page as a picture, without the empty margin below and, unless it is a whole page, beside it."""
    target = HERE / f"{name}.png"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("This needs chromium.")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={target}"]
    command += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    subprocess.run([*command, f"--window-size={width},{height}", page.as_uri()], check=True, capture_output=True)
    with Image.open(target) as image:
        cropped = without_margin(image.convert("RGB"), is_page)
        cropped.quantize(192, dither=Image.Dither.NONE).save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{target} has {target.stat().st_size} bytes, more than {MOST_BYTES}.")


def without_margin(image: Any, keeps_width: bool) -> Any:
    """The picture without rows and columns at its end that have the color of its last corner, but for a little."""
    ground = Image.new("RGB", image.size, image.getpixel((image.width - 1, image.height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    if box is None:
        return image
    width = image.width if keeps_width else min(image.width, box[2] + 16)
    return image.crop((0, 0, width, min(image.height, box[3] + 16)))


def terminal_picture(folder: Path) -> None:
    """The program in a terminal: in the middle of an epoch, after the failure of a worker."""
    program = f"{sys.executable} {HERE / 'digits_run.py'} {folder} > {folder}/output.txt"

    def is_worth_a_picture(lines: list[str]) -> bool:
        return any("epoch 6/8 train" in line and re.search(r" [34]\d/60", line) for line in lines)

    screen = screen_of(["bash", "-c", program], is_worth_a_picture, columns=118, lines=16, limit_s=300)
    page = folder / "terminal.html"
    page.write_text(as_html(screen, "python digits.py > output.txt"), encoding="utf-8")
    photograph(page, "progress-tqdm", 1100, 500)


def notebook_picture(folder: Path) -> None:
    """The card of a notebook that was really run."""
    cells = [NOTEBOOK.format(here=str(HERE)), "history"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    write_card(folder, "history-card", html_of(notebook, 1), width="880px")


def html_of(notebook: Any, number: int) -> str:
    """What a cell shows."""
    return str(notebook.cells[number].outputs[-1]["data"]["text/html"])


def write_card(folder: Path, name: str, html: str, *, is_dark: bool = False, width: str = "max-content") -> None:
    """A card as a picture."""
    page, ink = ("#111", "#eee") if is_dark else ("#fff", "#111")
    style = f"margin:0;padding:16px;background:{page};color:{ink};width:{width}"
    path = folder / f"{name}.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><body style="{style}">{html}', encoding="utf-8")
    photograph(path, name, 920, 900)


def main() -> None:
    """Makes all of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, HERE / "digits_run.py", folder], check=True, stdout=subprocess.DEVNULL)
        photograph(folder / "report.html", "report", 1240, 2800, is_page=True)
        photograph(folder / "report.html", "report-narrow-dark", 500, 1032, is_dark=True, is_page=True)
        card = (folder / "trainer.html").read_text(encoding="utf-8")
        write_card(folder, "trainer-card", card, is_dark=True, width="880px")
        notebook_picture(folder)
        terminal_picture(folder)


if __name__ == "__main__":
    main()
