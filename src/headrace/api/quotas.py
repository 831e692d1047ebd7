"""A tenant's quota around one request: a place before its body is read, its tokens once they are known, and what was
really used at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace.admission.quota import LimitName, Pass, Refusal, TenantLimits
from headrace.api.deps import Deps
from headrace.api.exchange import Exchange
from headrace.config.schema import Config
from headrace.errors import EngineError, Overloaded, QuotaExceeded
from headrace.messages.engine import Submit

_WHAT: Final[dict[LimitName, str]] = {
    "tenant_requests": "more requests per minute than this key may send",
    "tenant_tokens": "more tokens per minute than this key may use",
    "tenant_concurrency": "as many requests at once as this key may have",
}


@dataclass(slots=True)
class TenantQuota:
    """One request's stay; made by ``tenant_quota``. Without a tenant there is nothing to count."""

    _deps: Deps
    _exchange: Exchange
    _limits: TenantLimits
    _pass: Pass | None
    used_tokens: int | None = None
    """What it took, where no output tells it."""

    def charge(self, sequences: Sequence[Submit]) -> None:
        """Its prompt and what it is expected to generate are known. Raises QuotaExceeded."""
        self.charge_tokens(self._exchange.prompt_tokens + sum(_expected_tokens(sequence) for sequence in sequences))

    def charge_tokens(self, tokens: int) -> None:
        """It takes so many tokens. Raises QuotaExceeded."""
        if self._pass is None:
            return
        refusal = self._deps.quotas.charge(self._pass, self._limits, tokens, self._deps.clock())
        if refusal is not None:
            raise _refused(self._deps, self._exchange, self._pass.tenant, self._limits, refusal)
        _say_left(self._deps, self._exchange, self._pass.tenant, self._limits)


@contextmanager
def tenant_quota(deps: Deps, config: Config, exchange: Exchange) -> Iterator[TenantQuota]:
    """Take a place among the tenant's requests for the length of the block. Raises QuotaExceeded.

    A request that was shed, or that the engine failed before its first token, costs nothing. One that was the client's
    fault costs a request: whoever sends many of those is limited too.
    """
    tenant = exchange.tenant
    configured = None if tenant is None else config.tenants.get(tenant)
    if tenant is None or configured is None:
        yield TenantQuota(deps, exchange, TenantLimits(), None)
        return
    limits, quotas = configured.limits, deps.quotas
    quotas.keep(config.tenants)
    entered = quotas.enter(tenant, limits, deps.clock())
    if isinstance(entered, Refusal):
        raise _refused(deps, exchange, tenant, limits, entered)
    deps.metrics.tenants.entered(tenant)
    counts = True
    quota = TenantQuota(deps, exchange, limits, entered)
    try:
        yield quota
    except (Overloaded, EngineError):
        counts = _began(exchange)
        raise
    except QuotaExceeded:
        counts = False
        raise
    finally:
        tokens = _computed_tokens(exchange) if quota.used_tokens is None else quota.used_tokens
        quotas.leave(entered, limits, deps.clock(), tokens=tokens, counts=counts)
        deps.metrics.tenants.left(tenant)


def _began(exchange: Exchange) -> bool:
    return exchange.timing is not None and exchange.timing.first_s is not None


def _computed_tokens(exchange: Exchange) -> int:
    """Prompt and output of a request whose first token came; what never ran has none."""
    timing = exchange.timing
    return exchange.prompt_tokens + timing.tokens if timing is not None and _began(exchange) else 0


def _expected_tokens(sequence: Submit) -> int:
    limit, expected = sequence.max_tokens, sequence.expected_tokens
    if expected is None:
        return limit or 0
    return expected if limit is None else min(limit, expected)


def _refused(deps: Deps, exchange: Exchange, tenant: str, limits: TenantLimits, refusal: Refusal) -> QuotaExceeded:
    deps.metrics.tenants.refused(tenant, refusal.limit)
    _say_left(deps, exchange, tenant, limits)
    return QuotaExceeded(
        f"{_WHAT[refusal.limit]}; try again in {refusal.retry_after_s:.1f} s",
        reason=refusal.limit,
        retry_after_s=refusal.retry_after_s,
    )


def _say_left(deps: Deps, exchange: Exchange, tenant: str, limits: TenantLimits) -> None:
    """What the tenant has left, in the response's headers."""
    left = deps.quotas.left(tenant, limits, deps.clock())
    if left.requests is not None and limits.requests_per_min is not None:
        exchange.extra_headers += [
            (b"x-ratelimit-limit-requests", b"%d" % limits.requests_per_min),
            (b"x-ratelimit-remaining-requests", b"%d" % left.requests),
        ]
    if left.tokens is not None and limits.tokens_per_min is not None:
        exchange.extra_headers += [
            (b"x-ratelimit-limit-tokens", b"%d" % limits.tokens_per_min),
            (b"x-ratelimit-remaining-tokens", b"%d" % left.tokens),
        ]
