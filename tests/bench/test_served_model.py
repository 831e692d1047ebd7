"""What servers say about the model that they serve."""

from __future__ import annotations

import pytest

from headrace.bench.drive.served_model import ServedModel, served_model
from headrace.errors import ConfigError

NOTHING = (404, b'{"error": "not found"}')


def asked(models: tuple[int, bytes], props: tuple[int, bytes] = NOTHING, *, wanted: str | None = None) -> ServedModel:
    return served_model(lambda path: {"/v1/models": models, "/props": props}[path], wanted)


@pytest.mark.parametrize(
    ("models", "props", "tokens"),
    [
        pytest.param(b'{"data": [{"id": "m", "max_model_len": 4096}]}', NOTHING, 4096, id="headrace, vLLM, SGLang"),
        pytest.param(
            b'{"data": [{"id": "m", "meta": {"n_ctx": 2048, "n_ctx_train": 131072}}]}', NOTHING, 2048, id="llama-server"
        ),
        pytest.param(
            b'{"data": [{"id": "m", "meta": {"n_ctx_train": 131072}}]}',
            (200, b'{"default_generation_settings": {"n_ctx": 512, "params": {}}, "total_slots": 4}'),
            512,
            id="older llama-server",
        ),
        pytest.param(b'{"data": [{"id": "m", "meta": {"n_ctx": 0}}]}', NOTHING, None, id="no model loaded yet"),
        pytest.param(b'{"data": [{"id": "m", "max_model_len": null, "meta": null}]}', NOTHING, None, id="nulls"),
        pytest.param(b'{"data": [{"id": "m"}]}', (200, b"<html>"), None, id="a page for /props"),
        pytest.param(b'{"data": [{"id": "m"}]}', (200, b"{}"), None, id="empty /props"),
    ],
)
def test_the_context_is_read_where_a_server_says_it(
    models: bytes, props: tuple[int, bytes], tokens: int | None
) -> None:
    assert asked((200, models), props) == ServedModel("m", tokens)


def test_the_first_model_is_taken_unless_another_is_wanted() -> None:
    models = (200, b'{"data": [{"id": "a", "max_model_len": 1}, {"id": "b", "max_model_len": 2}]}')
    assert asked(models) == ServedModel("a", 1)
    assert asked(models, wanted="b") == ServedModel("b", 2)
    # Not listed: some servers take any name. The context of another model says nothing about it.
    assert asked(models, wanted="c") == ServedModel("c", None)


@pytest.mark.parametrize(
    "models", [(401, b'{"data": [{"id": "m"}]}'), (200, b'{"data": []}'), (200, b"hello"), NOTHING]
)
def test_without_a_list_a_name_must_be_given(models: tuple[int, bytes]) -> None:
    with pytest.raises(ConfigError, match=rf"^--model: GET /v1/models lists no model \(HTTP status {models[0]}\)"):
        asked(models)
    assert asked(models, wanted="m") == ServedModel("m", None)
