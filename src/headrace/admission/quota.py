"""What a tenant may ask for: requests and tokens per minute, and how much at once. Pure; times are handed in.

**Buckets.** A rate of R per minute is a bucket that holds what comes in ``burst_s`` seconds, B = R * burst_s / 60. What
was used leaks away at R. So in any span of t seconds at most B + R * t / 60 is admitted. A request that alone needs
more than B is admitted when the bucket is full, and is paid for afterwards: the next ones wait until its debt is gone.

**Tokens** are charged at admission as prompt plus expected output, and settled at the end with what was really
computed. Too low an expectation is a debt of the next requests; too high a one comes back.

**Reload.** What a tenant used stays with it: a higher limit lets it go on at once, a lower one makes it wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

LimitName = Literal["tenant_requests", "tenant_tokens", "tenant_concurrency"]
"""Which limit refused: a metric's label and a header's value."""

LIMITS: Final[tuple[LimitName, ...]] = ("tenant_requests", "tenant_tokens", "tenant_concurrency")

_SHORTEST_WAIT_S: Final = 0.05
_USUAL_WEIGHT: Final = 0.1
"""Weight of the latest request in the usual time that a tenant's requests take."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant; None: none. ``burst_s``: buckets hold what comes in so many seconds."""

    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    max_concurrent: int | None = None
    burst_s: float = 60.0

    @property
    def requests_held(self) -> float | None:
        """The capacity of the bucket of requests: at least one."""
        return None if self.requests_per_min is None else max(1.0, self.requests_per_min * self.burst_s / 60.0)

    @property
    def tokens_held(self) -> float | None:
        """The capacity of the bucket of tokens: at least one."""
        return None if self.tokens_per_min is None else max(1.0, self.tokens_per_min * self.burst_s / 60.0)


NO_LIMITS: Final = TenantLimits()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit has no room, and after how many seconds it should have."""

    limit: LimitName
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """What a tenant has left now, for its response's headers; None where there is no limit."""

    requests: int | None
    tokens: int | None


@dataclass(slots=True)
class Bucket:
    """What was used and has not leaked away by ``as_of_s``. It keeps no rate: that may change meanwhile."""

    used: float = 0.0
    as_of_s: float = 0.0

    def leak(self, per_min: float, now_s: float) -> None:
        """Let leak what the time since the last look allows. A clock that went back leaks nothing."""
        if now_s > self.as_of_s:
            self.used = max(0.0, self.used - per_min / 60.0 * (now_s - self.as_of_s))
        self.as_of_s = max(self.as_of_s, now_s)

    def wait_s(self, amount: float, held: float, per_min: float) -> float:
        """Seconds until ``amount`` fits, 0 when it does now; an amount above ``held`` fits when nothing is used."""
        over = self.used - max(0.0, held - amount)
        # A billionth is what adding and subtracting floats may leave over.
        return over * 60.0 / per_min if over > 1e-9 * held else 0.0

    def add(self, amount: float) -> None:
        """Use ``amount`` more; less than nothing gives back."""
        self.used = max(0.0, self.used + amount)


@dataclass(slots=True)
class _Account:
    requests: Bucket
    tokens: Bucket
    in_flight: int = 0
    usual_s: float = 1.0


@dataclass(eq=False, slots=True)
class Pass:
    """A tenant's request that came in; end it with ``Quotas.leave``. ``tokens`` are those charged so far."""

    tenant: str
    entered_s: float
    tokens: float = 0.0
    gone: bool = False


@dataclass(slots=True)
class Quotas:
    """Every tenant's account. Limits are handed in with each call, as configured at the moment."""

    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, tenant: str, limits: TenantLimits, now_s: float) -> Pass | Refusal:
        """A request comes, before anything is known of it: takes one of the requests and a place. A refusal takes
        nothing."""
        account = self._account(tenant, now_s)
        if limits.requests_per_min is not None and limits.requests_held is not None:
            account.requests.leak(limits.requests_per_min, now_s)
            wait_s = account.requests.wait_s(1.0, limits.requests_held, limits.requests_per_min)
            if wait_s > 0.0:
                return Refusal("tenant_requests", max(_SHORTEST_WAIT_S, wait_s))
        if limits.max_concurrent is not None and account.in_flight >= limits.max_concurrent:
            # Places come free as often as the tenant's requests usually end.
            return Refusal("tenant_concurrency", max(_SHORTEST_WAIT_S, account.usual_s / limits.max_concurrent))
        if limits.requests_per_min is not None:
            account.requests.add(1.0)
        account.in_flight += 1
        return Pass(tenant, now_s)

    def charge(self, entered: Pass, limits: TenantLimits, tokens: float, now_s: float) -> Refusal | None:
        """The request's tokens are known: take them, or say when they would fit. A refusal takes nothing."""
        if limits.tokens_per_min is None or limits.tokens_held is None:
            return None
        bucket = self._account(entered.tenant, now_s).tokens
        bucket.leak(limits.tokens_per_min, now_s)
        wait_s = bucket.wait_s(tokens, limits.tokens_held, limits.tokens_per_min)
        if wait_s > 0.0:
            return Refusal("tenant_tokens", max(_SHORTEST_WAIT_S, wait_s))
        bucket.add(tokens)
        entered.tokens += tokens
        return None

    def leave(self, entered: Pass, limits: TenantLimits, now_s: float, *, tokens: float, counts: bool = True) -> None:
        """The request ended: ``tokens`` were really computed for it. One that does not count (it was shed, or failed
        by no fault of the tenant) gives its place among the requests back. Ending twice is ending once."""
        if entered.gone:
            return
        entered.gone = True
        account = self._account(entered.tenant, now_s)
        account.in_flight -= 1
        if limits.tokens_per_min is not None:
            account.tokens.leak(limits.tokens_per_min, now_s)
            account.tokens.add(tokens - entered.tokens)
        if not counts and limits.requests_per_min is not None:
            account.requests.leak(limits.requests_per_min, now_s)
            account.requests.add(-1.0)
        if counts:
            account.usual_s += _USUAL_WEIGHT * (max(0.0, now_s - entered.entered_s) - account.usual_s)

    def left(self, tenant: str, limits: TenantLimits, now_s: float) -> Left:
        """What could be asked for now."""
        account = self._account(tenant, now_s)
        requests = tokens = None
        if limits.requests_per_min is not None and limits.requests_held is not None:
            account.requests.leak(limits.requests_per_min, now_s)
            requests = max(0, int(limits.requests_held - account.requests.used + 1e-6))
        if limits.tokens_per_min is not None and limits.tokens_held is not None:
            account.tokens.leak(limits.tokens_per_min, now_s)
            tokens = max(0, int(limits.tokens_held - account.tokens.used + 1e-6))
        return Left(requests, tokens)

    def in_flight(self) -> Mapping[str, int]:
        """Requests that came in and have not ended, by tenant."""
        return {tenant: account.in_flight for tenant, account in self._accounts.items()}

    def keep(self, tenants: Collection[str]) -> None:
        """Forget tenants that are not among these and have nothing running."""
        gone = [name for name, account in self._accounts.items() if name not in tenants and not account.in_flight]
        for name in gone:
            del self._accounts[name]

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(Bucket(as_of_s=now_s), Bucket(as_of_s=now_s))
        return account
