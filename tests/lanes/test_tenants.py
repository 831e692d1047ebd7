"""Who sends a request, and that keys stay secret."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from headrace.config.schema import Config, ServerConfig, Tenant
from headrace.errors import AuthenticationFailed, ConfigError
from headrace.lanes.tenants import TenantDirectory, authenticate

KEY_A = "sk-alpha-secret"
KEY_B = "sk-beta-secret"
KEY_C = "sk-gamma-secret"
OPEN = Config(tenants={"acme": Tenant(), "globex": Tenant()})
KEYED = Config(
    tenants={
        "acme": Tenant(api_keys=(KEY_A, "sha256:" + hashlib.sha256(KEY_B.encode()).hexdigest().upper())),
        "globex": Tenant(api_keys=("env:GLOBEX_KEY",)),
        "keyless": Tenant(),
    }
)
DIRECTORY = TenantDirectory.build(KEYED, {"GLOBEX_KEY": KEY_C})


def test_without_keys_access_is_open_and_the_header_names_a_configured_tenant() -> None:
    assert authenticate(OPEN, None, None) is None
    assert authenticate(OPEN, None, "acme") == "acme"
    assert authenticate(OPEN, "Bearer whatever", " globex ") == "globex"


def test_without_keys_an_unknown_tenant_is_no_tenant() -> None:
    assert authenticate(OPEN, None, "stranger") is None
    assert authenticate(OPEN, None, "") is None


def test_the_tenant_header_can_be_distrusted() -> None:
    config = msgspec.structs.replace(OPEN, server=ServerConfig(trust_tenant_header=False))
    assert authenticate(config, None, "acme") is None


@pytest.mark.parametrize(("key", "tenant"), [(KEY_A, "acme"), (KEY_B, "acme"), (KEY_C, "globex")])
def test_a_key_written_in_any_form_names_its_tenant(key: str, tenant: str) -> None:
    assert DIRECTORY.authenticate(f"Bearer {key}", None) == tenant
    assert DIRECTORY.authenticate(f"bearer  {key} ", None) == tenant


def test_with_keys_the_tenant_header_says_nothing() -> None:
    assert DIRECTORY.needs_key
    assert DIRECTORY.authenticate(f"Bearer {KEY_A}", "globex") == "acme"
    with pytest.raises(AuthenticationFailed):
        DIRECTORY.authenticate(None, "keyless")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic abc", KEY_A, f"Basic {KEY_A}", "Bearer wrong", f"Bearer {KEY_A}x"],
)
def test_anything_but_a_right_key_is_refused(authorization: str | None) -> None:
    with pytest.raises(AuthenticationFailed):
        DIRECTORY.authenticate(authorization, None)


@settings(deadline=None)
@given(st.text())
def test_any_header_is_refused_without_being_repeated(header: str) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        DIRECTORY.authenticate("Bearer " + header, None)
    assert len(header) < 12 or header not in str(caught.value)


def test_a_configured_digest_is_not_itself_a_key() -> None:
    with pytest.raises(AuthenticationFailed):
        DIRECTORY.authenticate("Bearer " + hashlib.sha256(KEY_B.encode()).hexdigest(), None)


def test_no_repr_shows_a_key_or_its_digest() -> None:
    shown = [repr(KEYED), str(KEYED.tenants), pretty_repr(KEYED), repr(DIRECTORY), pretty_repr(DIRECTORY)]
    digest = hashlib.sha256(KEY_A.encode())
    for text in shown:
        assert KEY_A not in text
        assert digest.hexdigest() not in text
        assert repr(digest.digest()) not in text
    assert "<2 hidden>" in repr(KEYED.tenants["acme"])


def test_one_key_for_two_tenants_is_refused_without_showing_it() -> None:
    config = Config(tenants={"a": Tenant(api_keys=(KEY_A,)), "b": Tenant(api_keys=(KEY_A,))})
    with pytest.raises(ConfigError, match="tenants 'a' and 'b' have the same API key") as caught:
        TenantDirectory.build(config)
    assert KEY_A not in str(caught.value)


@pytest.mark.parametrize("entry", ["env:MISSING", "env:not a name", "sha256:abc", "", "two words", "schlüssel"])
def test_a_malformed_entry_is_refused_without_showing_it(entry: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TenantDirectory.build(Config(tenants={"a": Tenant(api_keys=(entry,))}), {})
    assert not entry or entry not in str(caught.value)
