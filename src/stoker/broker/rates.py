"""Token buckets for remote services: how fast actions that use one may be handed out.

Pure: a bucket, its limit and a time give the next bucket. A service that says "too many requests"
lowers the rate by a factor; from then on it rises in a straight line, so that the pool finds what
the service bears without being told. What was handed out before the last lowering says nothing
new: one flood of refusals lowers once.

Invariant: in any span of time no more is handed out than ``burst`` plus the span times ``rate``.
"""

import math

import msgspec
from msgspec.structs import replace

FACTOR = 0.7
"""What a refusal leaves of the rate."""
RATE_SHARE_MIN = 0.01
"""Refusals never lower it below this share of the limit: somebody must find out that it is over."""
RECOVERY_SECONDS = 60.0
"""In which a rate would rise from nothing to its limit."""
WAIT_SECONDS_MAX = 300.0
"""Longest wait that is honoured: what asks for it may come from untrusted code."""
_NEARLY = 1e-6


class ServiceRate(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a service is asked for, by everybody together."""

    rate: float
    """Actions a second."""
    burst: float
    """Actions at once, after a pause; at least 1."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Where a service's rate stands."""

    at: float
    """Boot clock at which the rest holds; nothing is handed out before."""
    tokens: float
    rate: float
    """Tokens a second; rises to the limit."""
    lowered_at: float = 0.0
    """Boot clock of the last refusal that lowered the rate."""
    lowered: int = 0
    """How often it was."""


def full(limit: ServiceRate, now: float) -> Bucket:
    """Return the bucket of a service that nobody has used."""
    return Bucket(at=now, tokens=limit.burst, rate=limit.rate)


def reopened(bucket: Bucket, now: float) -> Bucket:
    """Return the bucket on another boot's clock: empty, at the rate it had."""
    return replace(bucket, at=now, tokens=0.0, lowered_at=0.0)


def emptied(bucket: Bucket, now: float) -> Bucket:
    """Return the bucket where it is not known what was handed out last."""
    return replace(bucket, at=max(bucket.at, now), tokens=0.0)


def moved(bucket: Bucket, limit: ServiceRate, now: float) -> Bucket:
    """Return the bucket at ``now``, or as it is while nothing may be handed out."""
    rate, tokens = min(bucket.rate, limit.rate), min(bucket.tokens, limit.burst)
    span = now - bucket.at
    if span < -WAIT_SECONDS_MAX:  # no wait is so long: the clock was set back
        at, lowered_at = now + WAIT_SECONDS_MAX, min(bucket.lowered_at, now)
        return replace(bucket, at=at, rate=rate, tokens=tokens, lowered_at=lowered_at)
    if span <= 0:
        return replace(bucket, rate=rate, tokens=tokens)
    rise = limit.rate / RECOVERY_SECONDS
    ramp = min(span, (limit.rate - rate) / rise)
    gained = rate * ramp + rise * ramp * ramp / 2 + limit.rate * (span - ramp)
    return replace(
        bucket,
        at=now,
        tokens=min(limit.burst, tokens + gained),
        rate=min(limit.rate, rate + rise * ramp),
    )


def room(bucket: Bucket, limit: ServiceRate, now: float) -> int:
    """Return how many actions may be handed out at ``now``."""
    bucket = moved(bucket, limit, now)
    return 0 if bucket.at > now else int(bucket.tokens + _NEARLY)


def due(bucket: Bucket, limit: ServiceRate, now: float) -> float:
    """Return when the next action may be handed out."""
    bucket = moved(bucket, limit, now)
    need = 1.0 - bucket.tokens
    if need <= _NEARLY:
        return bucket.at
    rise = limit.rate / RECOVERY_SECONDS
    ramp = (limit.rate - bucket.rate) / rise
    gained = bucket.rate * ramp + rise * ramp * ramp / 2
    if need > gained:
        return bucket.at + ramp + (need - gained) / limit.rate
    root = math.sqrt(bucket.rate * bucket.rate + 2 * rise * need)
    return bucket.at + 2 * need / (root + bucket.rate)


def taken(bucket: Bucket, limit: ServiceRate, now: float) -> Bucket:
    """Return the bucket after one action was handed out."""
    bucket = moved(bucket, limit, now)
    return replace(bucket, tokens=max(0.0, bucket.tokens - 1.0))


def lowered(
    bucket: Bucket, limit: ServiceRate, *, handed_at: float, wait: float, now: float
) -> Bucket:
    """Return the bucket after the service refused an action that was handed out at ``handed_at``.

    ``wait``: seconds it asked for, 0 where it named none.
    """
    bucket = moved(bucket, limit, now)
    wait = min(max(wait, 0.0), WAIT_SECONDS_MAX) if math.isfinite(wait) else WAIT_SECONDS_MAX
    until = max(bucket.at, now + wait)
    if handed_at <= bucket.lowered_at:
        tokens = bucket.tokens if until <= now else 0.0
        return replace(bucket, at=until, tokens=tokens)
    return Bucket(
        at=until,
        tokens=0.0,
        rate=max(limit.rate * RATE_SHARE_MIN, bucket.rate * FACTOR),
        lowered_at=now,
        lowered=bucket.lowered + 1,
    )
