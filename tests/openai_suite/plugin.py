"""pytest plugin for the ``openai`` package's own tests.

They were written against a mock that knows certain ids whatever happened before. A real server does not, so
before every test this puts the stored completion back and, by SIGHUP, the aliases that a test deleted. It
changes nothing else: what the server answers is checked by the tests as they are.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

STORED_ID = "completion_id"
DELETED_MODEL = "ft:gpt-4o-mini:acemeco:suffix:abc123"
_RELOAD_LIMIT_S = 10.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    _seed_completion(Path(os.environ["HEADRACE_SUITE_STORE"]))
    if not _knows_model():
        os.kill(int(os.environ["HEADRACE_SUITE_PID"]), signal.SIGHUP)
        _wait_for_model()


def _seed_completion(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    message = {"role": "assistant", "content": "stored", "refusal": None}
    completion = {
        "id": STORED_ID,
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "gpt-6-astra",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        "metadata": {},
    }
    stored = {"tenant": None, "completion": completion, "messages": [{"role": "user", "content": "string"}]}
    (folder / f"{STORED_ID}.json").write_text(json.dumps(stored))


def _knows_model() -> bool:
    url = f"{os.environ['TEST_API_BASE_URL']}/models/{DELETED_MODEL}"
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return False
        raise


def _wait_for_model() -> None:
    deadline = time.monotonic() + _RELOAD_LIMIT_S
    while not _knows_model():
        assert time.monotonic() < deadline, "the server did not reload its configuration"
        time.sleep(0.01)
