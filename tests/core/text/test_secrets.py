from __future__ import annotations

import json
import logging
import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from pprint import pformat
from typing import Any

import pytest

from raysgd.air.config import CheckpointConfig, RunConfig
from raysgd.callbacks import Checkpointing, CSVLogger, HTMLReport, JSONLogger, MLflowLogger, WandbLogger
from raysgd.core.text.secrets import has_secret, is_secret_name, masked, user_of
from raysgd.storage import StorageError, open_folder
from raysgd.torch import TorchTrainer
from raysgd.train.data_parallel_trainer import DataParallelTrainer
from raysgd.train.fit.recorder import Recorder
from raysgd.train.fit.restore import restore, save_trainer
from raysgd.tune.tuner import Tuner
from tests.helpers.run_if import missing_requirements
from tests.torch.operators_for_tests import LinearOperator
from tests.train.fit.notes import make_folder


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "s3://AKIA:s%2Fcret@bucket/a?access_key=one&region=x&secret_key=two&session_token=three&sas_token=4",
            "s3://***@bucket/a?access_key=***&region=x&secret_key=***&session_token=***&sas_token=***",
        ),
        ("s3://AKIA:s/cr+et==@bucket/a", "s3://***@bucket/a"),
        ("S3://AKIA:12/cr+et@my bucket/a b", "S3://***@my bucket/a b"),
        ("s3:/AKIA:secret@bucket/a", "s3:/***@bucket/a"),
        ("postgres://me:p@ss@host:5432/db", "postgres://***@host:5432/db"),
        ("https://account/a?sv=1&sig=abc%3D&se=2", "https://account/a?sv=1&sig=***&se=2"),
        (
            "Protocol=https;AccountName=a;AccountKey=b==;Suffix=c",
            "Protocol=https;AccountName=a;AccountKey=***;Suffix=c",
        ),
        ("{'lr': 1, 'dbPassword': 3, \"pwd\": \"a'b\"}", "{'lr': 1, 'dbPassword': 3, \"pwd\": \"***\"}"),
        (
            "host=h password=123 API-KEY=b, tokens=[1, 2], max_tokens=4",
            "host=h password=*** API-KEY=***, tokens=[1, 2], max_tokens=4",
        ),
        (
            "run --lr 0.1 --password abc --api-key 'a b' --tokens 5",
            "run --lr 0.1 --password *** --api-key '***' --tokens 5",
        ),
        ("curl -H 'Authorization: Bearer abc.def123' h", "curl -H 'Authorization: Bearer ***' h"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nMIIa\n-----END RSA PRIVATE KEY-----",
            "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
        ),
        ("to https://hooks.slack.com/services/T0/B0/abc now", "to https://hooks.slack.com/services/*** now"),
        ("sent ghp_0123456789abcdefABCD and eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0", "sent *** and ***"),
        ("connect(host='h', password=a,b) failed", "connect(host='h', password=***) failed"),
        ("{'secrets': {'a': 'b'}, 'key': 'is cut", "{'secrets': ***, 'key': 'is cut"),
        ("'api_key': 'is cut", "'api_key': '***'"),
        ("{'tokens': ['a', 'b'], 'n': 1}", "{'tokens': ***, 'n': 1}"),
        ("{'passwords': ['a)b', 'S'], 'n': 1}", "{'passwords': ***, 'n': 1}"),
        ("{'secrets': {'a': ('b]', \"c'}\")}, 'n': [1]}", "{'secrets': ***, 'n': [1]}"),
        (f"secrets={['a'] * 1000}, n=1", "secrets=***, n=1"),
        ("secrets=['a', 'is cut", "secrets=***"),
        ("run --password=ab(S --n 1, or --password ab[S", "run --password=*** --n 1, or --password ***"),
        ("a=b;AccountKey=ab'S;c=d", "a=b;AccountKey=***;c=d"),
        ("connect(password='ab'S', n=1) with token=a)b)", "connect(password='***', n=1) with token=***)"),
        ("'postgres://me:a'S@host/db', 'https://a?sig=a'S&b=c'", "'postgres://***@host/db', 'https://a?sig=***&b=c'"),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ\n-----END PGP PRIVATE KEY BLOCK-----",
            "-----BEGIN PGP PRIVATE KEY BLOCK-----***-----END PGP PRIVATE KEY BLOCK-----",
        ),
        (
            "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nMIIa\n---- END SSH2 ENCRYPTED PRIVATE KEY ----",
            "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----***---- END SSH2 ENCRYPTED PRIVATE KEY ----",
        ),
        (
            "could not open 's3://id:secret@a/b?token=c', nor `gs://d?secret_key=e`: http://id:f@host:80/g",
            "could not open 's3://***@a/b?token=***', nor `gs://d?secret_key=***`: http://***@host:80/g",
        ),
    ],
)
def test_no_secret_is_shown(text: str, shown: str) -> None:
    assert masked(text) == masked(shown) == shown
    assert has_secret(text)


@pytest.mark.parametrize(
    "value",
    [
        "abfs://container@account/a",
        "/mnt/key=3",
        "s3://bucket/10:30/run@2",
        "http://host:9000/me@2",
        "at 10:30: me@host",
        "unexpected token: ';', and num_tokens=5",
        "password=None",
        "in step: model(tokens=batch), where tokens=torch.Size([1, 2]) and {'tokens': [1, 2]}",
        "hf_model_for_classification_2_large, sk-learn, a bearer of news, - secret sauce, well-known --tokens",
        {"pad_token": "<pad>", "max_tokens": 7, "author": "me", "use_auth": True, "token": None, "key": "loss"},
        [1, ("a", {2.0}), {"b": {}}],
        Namespace(lr=0.1),
    ],
    ids=str,
)
def test_everything_else_is(value: Any) -> None:
    assert masked(value) is value or masked(value) == value
    assert not has_secret(str(value))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "API-KEY",
            "apiKey",
            "X-Api-Key",
            "APIKey",
            "access_token_v2",
            "tokens",
            "hfToken",
            "openai_key",
            "wandb_key",
        ),
        *("github_pat", "pass", "db_pass", "smtpPass", "cookie", "cookies", "webhook_url", "AWS_ACCESS_KEY_ID"),
        *(
            "aws_secret_access_key",
            "private_key_pem",
            "ssh_private_key",
            "bearer",
            "Authorization",
            "basic_auth",
            "otp",
        ),
    ],
)
def test_names_of_secrets_are_known_in_all_spellings(name: str) -> None:
    assert is_secret_name(name)
    assert masked({name: "abc", "lr": 0.1}) == {name: "***", "lr": 0.1}
    assert masked(f"{name}='abc'") == f"{name}='***'"
    assert masked(f"{name}=abc") == f"{name}={'abc' if name == 'tokens' else '***'}"
    assert masked(repr({name: "abc"})) == repr({name: "***"})
    assert masked([f"--{name}", "abc", "--lr", "0.1"]) == [f"--{name}", "***", "--lr", "0.1"]
    for harmless in (None, True, 0.1, 5, [1, 2], (3.0, None)):
        assert masked({name: harmless}) == {name: harmless}


@pytest.mark.parametrize(
    "name",
    [
        *("num_tokens", "tokenizer", "max_tokens", "max_new_tokens", "bypass", "passes", "compass", "pad_token"),
        *("eosToken", "special_tokens", "additional_special_tokens", "image_token", "class_token", "token_type_ids"),
        *("tokenizer_path", "key", "keys"),
        *("sort_key", "image_key", "label_keys", "monkey", "pattern", "path", "author", "design", "assigned", "passed"),
        *("cookiecutter", "session", "pin_memory", "dispatch", "patience", "keyword"),
    ],
)
def test_harmless_names_are_not_masked(name: str) -> None:
    assert not is_secret_name(name)
    assert masked({name: "abc"}) == {name: "abc"}
    for text in (f"{name}=abc", repr({name: "abc"}), f"--{name} abc"):
        assert masked(text) == text


def drawn(chance: random.Random, depth: int = 0) -> Any:
    """A value of any form, with secrets between any characters."""
    around = "ab'\"()[]{}\\,:;= \n@/&?%-"
    if depth > 2 or chance.random() < 0.4:
        before, after = ("".join(chance.choices(around, k=chance.randrange(8))) for _ in range(2))
        return f"{before}Hidden1Value{after}"
    parts = [drawn(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    return chance.choice((parts, tuple(parts), {f"key{number}": part for number, part in enumerate(parts)}))


def test_a_secret_of_any_form_is_masked_in_any_text_of_a_config() -> None:
    for seed in range(1000):
        chance = random.Random(seed)
        config = {"lr": 0.1, "password": drawn(chance), "nested": {"api_key": drawn(chance)}, "end": "'\"]"}
        for text in (repr(config), json.dumps(config), pformat(config), f"no password={config['password']!r} here"):
            shown = masked(text)
            assert "Hidden" not in shown, (seed, text)
            assert masked(shown) == shown, (seed, text)
        assert "Hidden" not in str(masked(config))


def test_the_patterns_do_not_hang_in_long_texts() -> None:
    for piece in ("a", "a=", "--a ", "eyJ", "key-", "'a': '", "[?a", "token=[", "token='\\", "token=)"):
        masked(piece * (200_000 // len(piece)))


def test_the_user_of_a_uri_ends_at_the_last_sign_before_the_bucket() -> None:
    assert (user_of("s3://id:a/b@bucket/c@d"), user_of("s3://bucket/c")) == ("id:a/b@", "")


URI: Any = "s3://id:Hidden1@bucket/a?sig=Hidden2"
NO_DICT: Any = [{"password": "Hidden", "env_vars": {"TOKEN": "Hidden"}}]


@pytest.mark.parametrize(
    "call",
    [
        lambda: TorchTrainer(training_operator_cls=LinearOperator, num_workers=URI),
        lambda: TorchTrainer(training_operator_cls=LinearOperator, config=NO_DICT),
        lambda: TorchTrainer(training_operator_cls=LinearOperator, runtime_env=NO_DICT),
        lambda: TorchTrainer(training_operator_cls=LinearOperator, detached=URI),
        lambda: RunConfig(name=URI),
        lambda: RunConfig(storage_path=[URI]),
        lambda: CheckpointConfig(num_to_keep=URI),
        lambda: DataParallelTrainer(loop, run_config=URI),
        lambda: Tuner(loop, param_space=NO_DICT),
        lambda: open_folder(f"{URI}\0"),
        lambda: open_folder("/").read(f"../{URI}"),
        lambda: CSVLogger(f"{URI}\0"),
    ],
)
def test_errors_of_arguments_show_none(call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"\*\*\*") as caught:
        call()
    assert "Hidden" not in str(caught.value)


NAMES = (
    *("password", "passwd", "dbPassword", "DB_PASSWORD", "pwd", "passphrase", "secret", "client-secret", "secret_key"),
    *(
        "private_key",
        "access_key",
        "accountKey",
        "api_key",
        "wandb_api_key",
        "apikey",
        "token",
        "auth_token",
        "hf.token",
    ),
    *("credentials", "connection_string", "connectionString", "dsn", "sas"),
)
TEXTS = (
    "s3://AKIA:{}/cr+et@bucket/a",
    "S3://AKIA:12/{}@my bucket/a",
    "https://account/a?sv=1&sig={}",
    "read postgres://me:{}@host/db first",
    "AccountName=a;AccountKey={}==;b=c",
    "{{'nested': {{'password': '{}'}}}}",
)
NUM_SECRETS = len(NAMES) + len(TEXTS) + 3


def hidden() -> Iterator[str]:
    return (f"Hidden{number}Value" for number in range(NUM_SECRETS))


def planted() -> dict[str, Any]:
    """A config with secrets of all kinds at all depths."""
    value = hidden()
    config: dict[str, Any] = {name: next(value) for name in NAMES}
    config["list"] = [{"deep": ({"text": text.format(next(value))},)} for text in TEXTS]
    return config | {
        "object": Namespace(password=next(value)),
        "path": PurePosixPath(f"s3://id:{next(value)}@bucket/a"),
        f"s3://id:{next(value)}@bucket": 0.5,
        "lr": 0.1,
    }


def found_in(content: str | bytes) -> list[str]:
    text = content if isinstance(content, str) else content.decode("latin-1")
    return [value for value in hidden() if value in text]


def assert_nothing_is_left_in(folder: Path) -> None:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert paths
    assert {str(path): found for path in paths if (found := found_in(path.read_bytes()))} == {}


@pytest.mark.long
def test_a_run_with_all_loggers_leaves_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    clean = ExitStack()
    assert len(found_in(repr(planted()))) == NUM_SECRETS >= 30
    callbacks: list[Any] = [HTMLReport(), JSONLogger(), CSVLogger(), Checkpointing()]
    if not missing_requirements(modules=["mlflow"]):
        import mlflow

        clean.callback(mlflow.set_tracking_uri, None)
        callbacks.append(MLflowLogger(tracking_uri=str(tmp_path / "ml")))
    if not missing_requirements(modules=["wandb"]):
        import wandb

        clean.callback(wandb.teardown)
        callbacks.append(WandbLogger("secrets", mode="offline"))
    with (
        caplog.at_level(logging.DEBUG, "raysgd"),
        clean,
        TorchTrainer(training_operator_cls=LinearOperator, config=planted(), use_local=True) as trainer,
    ):
        trainer.fit(1, folder=tmp_path / "run", callbacks=callbacks)
        assert found_in(repr(trainer) + repr(trainer.config)) == []
    assert_nothing_is_left_in(tmp_path)
    assert found_in(caplog.text) == []


def loop(config: dict[str, Any]) -> None:
    """Does nothing."""


def test_a_run_of_a_function_leaves_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, config = make_folder(tmp_path), planted()
    trainer = DataParallelTrainer(loop, train_loop_config=config)
    save_trainer(folder.experiment, DataParallelTrainer, trainer._arguments)
    recorder = Recorder(folder, {"train_loop_config": config}, RunConfig())
    recorder.begin_attempt()
    recorder.record({"loss": 1.0}, None)
    recorder.end_run(ValueError(f"no such config: {config}"))
    assert_nothing_is_left_in(tmp_path)
    assert found_in(repr(trainer) + caplog.text) == []
    assert config == planted()


def test_a_config_with_secrets_is_needed_again(tmp_path: Path) -> None:
    arguments = {"train_loop_per_worker": loop, "train_loop_config": {"lr": 1, "pwd": "abc"}}
    save_trainer(open_folder(tmp_path / "run"), DataParallelTrainer, arguments)
    with pytest.raises(ValueError, match=r"`train_loop_config` was .*'pwd': '\*\*\*'.*Pass the whole value again"):
        restore(DataParallelTrainer, tmp_path / "run")
    again, _ = restore(DataParallelTrainer, tmp_path / "run", train_loop_config={"lr": 1, "pwd": "abc"})
    assert again._arguments["train_loop_config"] == {"lr": 1, "pwd": "abc"}


@pytest.mark.parametrize("bucket", ["bucket", "my bucket"])
@pytest.mark.parametrize("scheme", ["s3", "S3"])
def test_a_store_that_cannot_be_reached_shows_no_part_of_a_key(
    bucket: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSGD_STORAGE_TIMEOUT_S", "0")
    folder = open_folder(f"{scheme}://AKIA:Hidden/Value@{bucket}/a?scheme=http&endpoint_override=127.0.0.1:1&region=x")
    with pytest.raises(StorageError) as caught:
        folder.read("b")
    for part in ("AKIA", "Hidden", "Value"):
        assert part not in str(caught.value) + str(caught.value.__cause__) + repr(folder)
