"""Secrets in text: what is hidden, and what stays readable."""

from __future__ import annotations

import logging
import sys
import traceback

import pytest

from dflash_core.errors import UserError
from dflash_core.redaction import looks_secret, redact, redact_log_records, redact_output, redacted_exceptions
from dflash_core.references import secret_value

CANARY = "Canary-5f3a9b1c7d"


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"https://user:{CANARY}@host/path", "https://***@host/path"),
        (f"postgresql://mlflow:{CANARY}@host/db failed", "postgresql://***@host/db failed"),
        (f"curl -H 'Authorization: Bearer {CANARY}' URL", "curl -H 'Authorization: Bearer ***' URL"),
        (f"curl -H 'X-Api-Key: {CANARY}' URL", "curl -H 'X-Api-Key: ***' URL"),
        (f"curl -u me:{CANARY} URL", "curl -u me:*** URL"),
        (f"http://host/hook?token={CANARY}&x=1", "http://host/hook?token=***&x=1"),
        (f"https://hooks.slack.com/services/T0/B0/{CANARY}", "https://hooks.slack.com/services/***"),
        ("wrong key sk-abcdefghij0123456789", "wrong key ***"),
        ("hf_abcdefghijklmnopqrstuvwx is invalid", "*** is invalid"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, redacted: str) -> None:
    assert redact(text) == redacted
    assert looks_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        "curl -H 'Authorization: Bearer $TOKEN' https://host/hook",
        "eos_token=2, pad_token='<|endoftext|>'",
        "http://127.0.0.1:5000/#/experiments/1/runs/0a1b2c",
        "the bearer authentication of the endpoint",
        "sqlite:////data/runs/mlflow.db",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_values_of_variables_with_secret_names_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", f"{CANARY}\n")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")
    monkeypatch.setenv("SOME_TOKEN_FILE", "/etc/token-file")
    assert redact(f"401 {CANARY}") == "401 ***"
    assert redact("parallelism in /etc/token-file") == "parallelism in /etc/token-file"
    assert str(UserError(f"the key {CANARY} is wrong")) == "the key *** is wrong"


def test_log_records_are_hidden_with_their_tracebacks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    factory = logging.getLogRecordFactory()
    try:
        redact_log_records()
        try:
            raise RuntimeError(f"no {CANARY}")
        except RuntimeError:
            logging.getLogger("redaction").exception("a key: %s", CANARY)
    finally:
        logging.setLogRecordFactory(factory)
    assert "a key: ***" in caplog.text
    assert "RuntimeError: no ***" in caplog.text
    assert CANARY not in caplog.text


def test_exceptions_are_hidden_with_their_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    with pytest.raises(RuntimeError) as caught, redacted_exceptions():
        raise RuntimeError(f"no {CANARY}") from ValueError(CANARY)
    assert str(caught.value) == "no ***"
    assert str(caught.value.__cause__) == "***"


def test_a_reference_is_the_stripped_value_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", f"{CANARY}\r\n")
    assert secret_value("env:PLACE", "tracking.uri") == CANARY
    assert redact(CANARY) == "***"
    assert secret_value("http://host", "tracking.uri") == "http://host"


def test_a_reference_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLACE", raising=False)
    with pytest.raises(UserError, match=r"tracking\.uri: the environment variable 'PLACE' is not set"):
        secret_value("env:PLACE", "tracking.uri")
    monkeypatch.setenv("PLACE", f"{CANARY}-a\nb")
    with pytest.raises(UserError, match="control characters"):
        secret_value("env:PLACE", "tracking.uri")


def test_output_is_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    factory = logging.getLogRecordFactory()
    try:
        redact_output()
        print(f"resuming with {CANARY}", flush=True)
        sys.stdout.writelines([CANARY, "\n"])
        try:
            raise RuntimeError(f"no {CANARY}")
        except RuntimeError:
            traceback.print_exc()
        assert sys.stdout.encoding
    finally:
        logging.setLogRecordFactory(factory)
    printed = capsys.readouterr()
    assert printed.out == "resuming with ***\n***\n"
    assert "RuntimeError: no ***" in printed.err
    assert CANARY not in printed.err
