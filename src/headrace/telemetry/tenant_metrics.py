"""What each tenant asks for and gets. The number of label values is bounded whatever the configuration says."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

MOST_TENANTS: Final = 100
"""Tenants with lines of their own: the first so many that send something. The rest share ``other``."""

OTHER: Final = "other"
NO_TENANT: Final = "none"


class TenantMetrics:
    """Counters by tenant; names come from the configuration, never from what a client wrote."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._named: set[str] = set()
        self._requests = Counter(
            "headrace_tenant_requests", "Requests ended, by tenant", ["tenant", "outcome"], registry=registry
        )
        self._tokens = Counter(
            "headrace_tenant_tokens", "Tokens of prompts and answers, by tenant", ["tenant", "kind"], registry=registry
        )
        self._refusals = Counter(
            "headrace_tenant_refusals", "Requests over a limit of their tenant", ["tenant", "limit"], registry=registry
        )
        self._in_flight = Gauge(
            "headrace_tenant_in_flight", "Requests that a tenant has at the moment", ["tenant"], registry=registry
        )

    def entered(self, tenant: str) -> None:
        """A request of the tenant came in."""
        self._in_flight.labels(self._label(tenant)).inc()

    def left(self, tenant: str) -> None:
        """It ended."""
        self._in_flight.labels(self._label(tenant)).dec()

    def refused(self, tenant: str, limit: str) -> None:
        """A request was over one of the tenant's limits."""
        self._refusals.labels(self._label(tenant), limit).inc()

    def ended(self, tenant: str | None, outcome: str, *, prompt_tokens: int, output_tokens: int) -> None:
        """Any request for tokens ended, of a tenant or of nobody."""
        label = NO_TENANT if tenant is None else self._label(tenant)
        self._requests.labels(label, outcome).inc()
        if prompt_tokens:
            self._tokens.labels(label, "prompt").inc(prompt_tokens)
        if output_tokens:
            self._tokens.labels(label, "output").inc(output_tokens)

    def _label(self, tenant: str) -> str:
        if tenant in self._named:
            return tenant
        if len(self._named) >= MOST_TENANTS:
            return OTHER
        self._named.add(tenant)
        return tenant
