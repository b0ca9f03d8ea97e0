"""Judges the network: which pairs of hosts and which collectives are slow, and because of which host. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.base.io import format_bytes, format_seconds
from meshwright.ops.preflight.expectations import Expectations
from meshwright.ops.preflight.measurements import GroupMeasurement, HostMeasurements, PairMeasurement, Reachability
from meshwright.ops.preflight.report import PreflightRow, Verdict, host_row

SLOW_PAIR = {"cuda": 0.7, "cpu": 0.5}
"""A pair of hosts is slow below this fraction of the reference bandwidth."""
SLOW_LATENCY = 5.0
"""A pair of hosts is slow above this multiple of the reference latency."""
MIN_SLOW_LATENCY = 1e-3
"""Seconds of latency below which a pair is never slow: one scheduling delay of the operating system is shorter."""
SLOW_GROUP = {"cuda": 0.7, "cpu": 0.33}
"""A collective is slow below this fraction of the reference rate."""
CULPRIT_SHARE = 0.8
"""Share of a host's pairs that must be slow for the host to be the cause."""
UNREACHABLE = "look at firewall, routes and the address of the host (MESHWRIGHT_HOST_ADDRESS, GLOO_SOCKET_IFNAME)"
MIN_PAIRS = 2
"""Pairs of a host without which a slow host cannot be told from a slow link."""


@dataclass(frozen=True)
class PairReference:
    """What pairs are compared with. On one pair, there are no others."""

    bandwidth: float
    latency: float

    @classmethod
    def of(cls, pairs: Sequence[PairMeasurement]) -> PairReference:
        if len(pairs) < 2:
            return cls(0.0, 0.0)
        return cls(-quartile([-pair.bandwidth for pair in pairs]), quartile([pair.latency for pair in pairs]))

    def is_slow(self, pair: PairMeasurement, device_type: str, planned: float | None = None) -> bool:
        late = self.latency > 0 and pair.latency > max(SLOW_LATENCY * self.latency, MIN_SLOW_LATENCY)
        return late or pair.bandwidth < SLOW_PAIR[device_type] * max(self.bandwidth, planned or 0.0)


def judge_pairs(measurements: HostMeasurements, expected: Expectations) -> Iterator[PreflightRow]:
    """One row per pair. A slow host is named once, for all of its pairs; any other slow pair is a slow link."""
    pairs, kind = measurements.pairs, device_type(measurements)
    reference = PairReference.of(pairs)
    slow: set[PairMeasurement] = set()
    rows: dict[PairMeasurement, tuple[str, str]] = {}
    for pair in pairs:
        planned = expected.pair_bandwidth(pair.message_bytes)
        if reference.is_slow(pair, kind, planned):
            slow.add(pair)
        usual, source = max((reference.bandwidth, "other pairs"), (planned or 0.0, "planner"))
        latency = f", {format_seconds(reference.latency)}" if reference.latency else ""
        comparison = f"{format_bytes(usual)}/s ({source}){latency}" if usual else "-"
        rows[pair] = comparison, f"{format_bytes(pair.bandwidth)}/s, {format_seconds(pair.latency)}"
    culprits = slow_hosts(pairs, slow)
    for host in culprits:
        own = [pair for pair in pairs if host in pair.hosts]
        best = max(own, key=lambda pair: pair.bandwidth)
        yield host_row(
            "network",
            "host",
            host,
            rows[best][0],
            f"{rows[best][1]} at best, in {len(own)} pairs",
            "slow",
            "look at the adapter, cable and switch port of the host (ethtool, ibstat), and its NCCL_IB_HCA",
        )
    for pair in pairs:
        is_link = pair in slow and not culprits.intersection(pair.hosts)
        everywhere = is_link and len(slow) == len(pairs) > 1
        yield PreflightRow(
            "network",
            "link",
            f"{pair.first} - {pair.second}",
            *rows[pair],
            "slow" if is_link else "ok",
            ""
            if not is_link
            else "every pair is slow: look at the interface that is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
            if everywhere
            else "look at the path between the two hosts: switches, cables, routes",
        )


def slow_hosts(pairs: Sequence[PairMeasurement], slow: set[PairMeasurement]) -> set[str]:
    """The hosts that are the cause of slow pairs: most of their pairs are slow, while pairs without them are not. If
    every pair is slow, no host is the cause.
    """
    counts: dict[str, list[bool]] = {}
    for pair in pairs:
        for host in pair.hosts:
            counts.setdefault(host, []).append(pair in slow)
    culprits = {
        host for host, flags in counts.items() if len(flags) >= MIN_PAIRS and sum(flags) >= CULPRIT_SHARE * len(flags)
    }
    return set() if len(culprits) == len(counts) else culprits


def judge_reachability(measurements: HostMeasurements) -> Iterator[PreflightRow]:
    """A host that no other host can connect to is broken; any other connection that fails is a broken link."""
    incoming: dict[str, list[Reachability]] = {}
    for attempt in measurements.reached:
        incoming.setdefault(attempt.target, []).append(attempt)
    closed = {host for host, attempts in incoming.items() if all(attempt.problem for attempt in attempts)}
    if closed == set(incoming):
        closed = set()  # no host is the cause
    for host, attempts in incoming.items():
        verdict: Verdict = "broken" if host in closed else "ok"
        found = f"none of {len(attempts)}: {attempts[0].problem}" if host in closed else f"{len(attempts)} hosts"
        yield host_row("network", "connections", host, "connections of other hosts", found, verdict, UNREACHABLE)
    for attempt in measurements.reached:
        if attempt.problem and not closed.intersection((attempt.source, attempt.target)):
            where = f"{attempt.source} - {attempt.target}"
            yield PreflightRow("network", "connection", where, "a connection", attempt.problem, "broken", UNREACHABLE)


def judge_groups(measurements: HostMeasurements, expected: Expectations) -> Iterator[PreflightRow]:
    """Compares each collective of the layout with the other groups of its axis, and with the planner's figure."""
    limit = SLOW_GROUP[device_type(measurements)]
    kinds: dict[tuple[str, str], list[GroupMeasurement]] = {}
    for group in measurements.groups:
        kinds.setdefault((group.axis, group.collective), []).append(group)
    for (axis, collective), groups in kinds.items():
        usual = quartile([group.seconds for group in groups]) if len(groups) > 1 else None
        compared = [reference_seconds(group, usual, expected) for group in groups]
        slow = [seconds is not None and group.seconds * limit > seconds
                for group, (seconds, _) in zip(groups, compared, strict=True)]  # fmt: skip
        host = common_host(measurements, groups, slow)
        for group, (seconds, source), is_slow in zip(groups, compared, slow, strict=True):
            verdict: Verdict = "slow" if is_slow else "ok"
            yield PreflightRow(
                "collectives",
                f"{collective} over {axis}",
                f"ranks {ranks_text(group.ranks)}",
                "-" if seconds is None else f"{format_seconds(seconds)} ({source})",
                f"{format_seconds(group.seconds)} for {format_bytes(group.message_bytes)}",
                verdict,
                "" if not is_slow else f"look at host {host}" if host else "look at the links between its hosts",
                host if is_slow else "",
            )


def reference_seconds(group: GroupMeasurement, usual: float | None, expected: Expectations) -> tuple[float | None, str]:
    """The shorter one of the usual seconds and the planner's, and which one it is."""
    planned = expected.group_seconds(group)
    known = [(seconds, source) for seconds, source in ((usual, "other groups"), (planned, "planner")) if seconds]
    return min(known) if known else (None, "")


def common_host(measurements: HostMeasurements, groups: Sequence[GroupMeasurement], slow: Sequence[bool]) -> str:
    """The one host that all slow groups have and that no other group has, or an empty string."""
    hosts = {rank.rank: rank.host for rank in measurements.ranks}
    members = [{hosts.get(rank, "") for rank in group.ranks} for group in groups]
    if not any(slow) or all(slow):
        return ""
    shared = set.intersection(*(m for m, is_slow in zip(members, slow, strict=True) if is_slow))
    shared -= set().union(*(m for m, is_slow in zip(members, slow, strict=True) if not is_slow))
    return shared.pop() if len(shared) == 1 else ""


def quartile(values: Sequence[float]) -> float:
    """The value that a quarter of the values do not exceed. One slow host of three makes two of three pairs slow: the
    median would be slow itself.
    """
    return sorted(values)[(len(values) - 1) // 4] if values else 0.0


def device_type(measurements: HostMeasurements) -> str:
    return next((rank.device.type for rank in measurements.ranks if rank.device is not None), "cpu")


def ranks_text(ranks: Sequence[int]) -> str:
    """Lists up to eight ranks."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > 8 else shown
