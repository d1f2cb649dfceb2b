"""The tables of the recipes: they name all that the other library has, and the lines that they tell to write run."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from raysgd import TorchTrainer, TrainingOperator, callbacks
from raysgd.callbacks import Callback, WorkerCallback
from raysgd.core import synonyms as _synonyms
from raysgd.core.tables import read_table
from raysgd.operators import HuggingFaceOperator
from tests.docs.test_docs import ROOT

pytestmark = pytest.mark.long

LIGHTNING, TRANSFORMERS, KERAS = "lightning-trainer", "training-arguments", "keras-callbacks"
PACKAGES = {LIGHTNING: "lightning", TRANSFORMERS: "transformers", KERAS: "keras"}
ELSEWHERE = {"seed_everything"}
"""What the tables name beside arguments and classes."""

NEEDS_MACHINES = ("num_workers", "use_gpu")
"""Options with which other tests train, on workers and on GPUs."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        page: The recipe.
        section: The heading above.
        theirs: The words of the other library, such as `max_epochs=5`.
        cells: The lines to write instead, for each column behind the first; without any where there is no counterpart.
        text: All of it.
    """

    page: str
    section: str
    theirs: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    text: str

    @property
    def names(self) -> list[str]:
        """The names of arguments, methods and classes in the first column."""
        return [re.split(r"[=(]", word)[0].rpartition(".")[2] for word in self.theirs]

    @property
    def has_counterpart(self) -> bool:
        return any(self.cells)


def code(cell: str) -> tuple[str, ...]:
    """What stands in backticks and is no link."""
    return tuple(re.findall(r"(?<!\[)`([^`]+)`(?!\])", cell))


def rows_of(page: str) -> list[Row]:
    lines = (ROOT / "docs" / "recipes" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    section, found, width = "", [], 0
    for line in lines:
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("|---"):
            continue
        if not line.startswith("| "):
            width = 0
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not width:  # the head: columns with a title hold code
            width = sum(bool(cell) for cell in cells)
            continue
        ours = [cell if cell != "none" else "" for cell in cells[1:width]]
        found.append(Row(page, section, code(cells[0]), tuple(map(code, ours)), line))
    return found


ROWS = {page: rows_of(page) for page in PACKAGES}


def shown(row: Row) -> str:
    return row.names[0]


def with_code(page: str) -> list[Row]:
    return [row for row in ROWS[page] if row.has_counterpart and "| override `" not in row.text]


def imported(page: str) -> Any:
    """The package that a page is about, in the version that it says."""
    name = PACKAGES[page]
    module = pytest.importorskip(name)
    [version] = re.findall(rf"{name} (\d+\.\d+)", (ROOT / "docs" / "recipes" / f"{page}.md").read_text("utf-8").lower())
    if not module.__version__.startswith(f"{version}."):
        pytest.skip(f"the page is about {name} {version}, and this is {module.__version__}")
    return module


def names_on(page: str, *sections: str) -> set[str]:
    return {name for row in ROWS[page] if not sections or row.section in sections for name in row.names}


# ------------------------------------------------------------------------------------------- nothing is left out


def test_the_tables_name_every_argument_callback_and_logger_of_lightning() -> None:
    imported(LIGHTNING)
    pl = importlib.import_module("lightning.pytorch")
    arguments = set(inspect.signature(pl.Trainer).parameters)
    public = arguments | set(pl.callbacks.__all__) | set(pl.loggers.__all__)
    named = names_on(LIGHTNING)
    assert public - named == set()
    methods = {name for name in named - public if hasattr(pl.Trainer, name) or hasattr(pl.LightningModule, name)}
    assert named - public - methods == ELSEWHERE


def test_the_tables_name_every_training_argument() -> None:
    transformers = imported(TRANSFORMERS)
    public = {field.name for field in fields(transformers.TrainingArguments)}
    of_trainer = set(inspect.signature(transformers.Trainer).parameters) - {"args"}
    named = names_on(TRANSFORMERS)
    assert (public | of_trainer) - named == set()
    assert named - public - of_trainer == set()


def test_the_table_names_every_callback_of_keras() -> None:
    keras = imported(KERAS)
    public = {name for name, value in vars(keras.callbacks).items() if inspect.isclass(value)}
    assert names_on(KERAS) == public - {"CallbackList"}


@pytest.mark.parametrize("page", list(PACKAGES))
def test_no_word_stands_in_two_rows_of_a_page(page: str) -> None:
    places = [(row.section, word) for row in ROWS[page] for word in row.theirs]
    assert len(places) == len(set(places)) > 10


# --------------------------------------------------------------------------------------------- each line runs


def run_line(line: str, names: dict[str, Any]) -> Any:
    try:
        return eval(line, names)
    except SyntaxError:
        exec(line, names)
        return None


class Stage:
    """What the lines of a table are about: a trainer that has trained a little, its data, and what is imported.

    Args:
        operator: What is trained.
        config: For that.
        data: Samples.
        collate: Makes a batch of them.
    """

    def __init__(self, operator: Any, config: dict[str, Any], data: Any, collate: Any = None) -> None:
        self.operator, self.config, self.data, self.collate = operator, config, data, collate

    def make(self, **options: Any) -> TorchTrainer[Any]:
        options = {"config": self.config, "training_operator_cls": self.operator, "use_gpu": False, **options}
        return TorchTrainer(use_local=True, **options)

    def run(self, row: Row) -> None:
        with self.make() as trainer:
            trainer.fit(1, progress=False)
            trainer.save("a.ckpt")
            names = self.names(trainer)
            for line in row.cells[0]:
                few = re.sub(r"max_steps=\d+", "max_steps=9", re.sub(r"num_steps=\d+", "num_steps=3", line))
                found = run_line(few, names)
                if isinstance(found, Callback | WorkerCallback):
                    trainer.fit(2, callbacks=[found], progress=False)
                if isinstance(found, DataLoader):
                    assert next(iter(found)) is not None

    def names(self, trainer: Any) -> dict[str, Any]:
        loader = self.loader(batch_size=4)
        return {
            **{name: getattr(callbacks, name) for name in callbacks.__all__},
            "TorchTrainer": self.try_trainer,
            "DataLoader": lambda _, **options: self.loader(**options),
            "hook": lambda: None,
            "trainer": trainer,
            "data": self.data,
            "loader": loader,
            "two_batches": self.loader(Subset(self.data, range(8)), batch_size=4),
            "rows": next(iter(loader))[0] if self.collate is None else self.data[:3],
            "torch": torch,
            "Reviews": self.operator,
        }

    def loader(self, data: Any = None, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data if data is None else data, collate_fn=self.collate, **options)

    def try_trainer(self, _: Any, **options: Any) -> None:
        """Train with these options, as far as that needs no machines."""
        assert set(options) <= set(inspect.signature(TorchTrainer).parameters)
        options = {name: value for name, value in options.items() if name not in NEEDS_MACHINES}
        if options.get("compile") is True:
            options["compile"] = {"backend": "eager"}  # the default one takes a compiler, and half a minute
        if "sync_batchnorm" in options:
            with pytest.raises(ValueError, match="on GPUs only"):
                self.make(**options)
            return
        options["config"] = {**self.config, **options.get("config", {})}
        with self.make(**options) as trainer:
            trainer.fit(1, progress=False)


@pytest.fixture(autouse=True)
def takes_away_what_packages_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning leaves it once it is imported
    monkeypatch.setenv("COMET_INTERNAL_SENTRY_DSN", "")  # comet_ml would send its own errors to its makers
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Files go there; a logger that could not write is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    assert "could not write" not in caplog.text
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="module")
def of_lightning() -> Stage:
    pl = pytest.importorskip("lightning.pytorch")

    class Line(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self.layer(x), y)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0] if isinstance(batch, list | tuple) else batch)  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.linspace(0, 1, 16).reshape(-1, 1)
    data = TensorDataset(x, 2 * x)
    loader = DataLoader(data, batch_size=4)
    return Stage(TrainingOperator.from_ptl(Line, train_dataloader=loader, val_dataloader=loader), {}, data)


@pytest.fixture
def of_transformers() -> Stage:
    transformers = pytest.importorskip("transformers")

    class Reviews(HuggingFaceOperator):
        def build_model(self, config: dict[str, Any]) -> Any:
            sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
            return transformers.BertForSequenceClassification(
                transformers.BertConfig(vocab_size=10, num_labels=2, **sizes)
            )

        def build_data(self, config: dict[str, Any]) -> Any:
            return data, data

    data = [{"input_ids": torch.tensor([index % 10, 3]), "labels": index % 2} for index in range(16)]
    return Stage(Reviews, {"batch_size": 4}, data, torch.utils.data.default_collate)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("row", with_code(LIGHTNING), ids=shown)
def test_a_row_for_lightning_runs(row: Row, of_lightning: Stage) -> None:
    of_lightning.run(row)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("row", with_code(TRANSFORMERS), ids=shown)
def test_a_row_for_transformers_runs(row: Row, of_transformers: Stage) -> None:
    of_transformers.run(row)


def test_methods_to_override_are_there() -> None:
    methods = [name for row in ROWS[TRANSFORMERS] if "| override `" in row.text for name in row.cells[0]]
    assert len(methods) > 5
    assert [name for name in methods if not callable(getattr(HuggingFaceOperator, name))] == []


@pytest.fixture
def make_of_keras() -> Callable[..., Any]:
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    from raysgd.tf import TFTrainer

    def make_model(config: dict[str, Any]) -> Any:
        model = keras.Sequential([keras.layers.Input([1]), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(0.1, use_ema=True), loss="mse")
        return model

    def make_data(config: dict[str, Any]) -> Any:
        x = tf.reshape(tf.linspace(0.0, 1.0, 8), [-1, 1])
        data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
        return data, data

    def make(**fit_config: Any) -> Any:
        config = {"fit_config": {"verbose": 0, **fit_config}}
        return TFTrainer(make_model, make_data, config=config, num_workers=1, use_local=True, use_gpu=False)

    return make


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("row", [row for row in ROWS[KERAS] if row.has_counterpart], ids=shown)
def test_a_row_for_keras_runs(row: Row, make_of_keras: Callable[..., Any]) -> None:
    import keras

    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    for line in row.cells[0] if row.theirs != ("TensorBoard",) or has_tensorboard else ():
        with make_of_keras(epochs=2, callbacks=[run_line(line, {"keras": keras})]) as trainer:
            assert trainer.train()["loss"] > 0
    for line in row.cells[1]:
        names = {name: getattr(callbacks, name) for name in callbacks.__all__}
        with make_of_keras() as trainer:
            assert len(trainer.fit(2, callbacks=[run_line(line, names)], progress=False)) == 2


# ------------------------------------------------------------------------------------- errors say what the tables say

ARGUMENTS = [
    row
    for page in (LIGHTNING, TRANSFORMERS)
    for row in ROWS[page]
    if row.section in ("Arguments of the trainer", "How to train", "Save, evaluate, log")
]
ANSWERED_OTHERWISE = {
    *("activation_checkpointing", "strategy", "sync_batchnorm"),  # ours
    *("dataloader_multiprocessing_context", "length_column_name", "train_sampling_strategy"),
    *("do_eval", "do_predict", "do_train", "enable_model_summary", "eval_delay", "eval_on_start", "seed_everything"),
    *("optim_args", "optim_target_modules", "reload_dataloaders_every_n_epochs"),
    *("compute_loss_func", "model_init", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics"),
    *("processing_class", "project", "run_name"),
}
"""Words that no one would give to a trainer of ours, or ours already."""


def options_of(line: str) -> set[str]:
    """The options of a trainer, of `fit` and of its callbacks that a line says; not those of what `setup` makes."""
    if "in `setup`" in line:
        return set()
    return {option for code in re.findall(r"`([^`]*)`", line) for option in re.findall(r"(\w+)=", code)}


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: f"{row.page}-{shown(row)}")
def test_errors_say_what_the_table_says(row: Row) -> None:
    lines = {name: _synonyms.instead_of(name, _synonyms.TORCH) for name in row.names}
    if row.has_counterpart:
        assert {name for name, line in lines.items() if line is None} <= ANSWERED_OTHERWISE
    else:
        assert not any(lines.values())
    for line in filter(None, lines.values()):
        assert options_of(line) - set(re.findall(r"(\w+)=", row.text)) == set(), line


@pytest.mark.parametrize("page", list(PACKAGES))
def test_errors_name_the_callbacks_of_the_tables(page: str) -> None:
    table = read_table(_synonyms.__file__).items()
    rows_of_callbacks = [(names, row["callback"]) for names, row in table if "callback" in row]
    classes = {theirs: ours.partition("(")[0] for names, ours in rows_of_callbacks for theirs in names.split()}
    rows = {name: row for row in ROWS[page] for name in row.names if name in classes and row.cells[-1]}
    assert [name for name, row in rows.items() if f"{classes[name]}(" not in " ".join(row.cells[-1])] == []
