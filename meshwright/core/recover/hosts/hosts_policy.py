"""How many hosts a run may use: the numbers of hosts on which its layout and its batch divide. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from meshwright.base.config import RunConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.recover.hosts.leader import HostsPolicy
from meshwright.errors import ConfigError


def hosts_policy(config: RunConfig, own_model: bool = False) -> HostsPolicy:
    """The policy of a run. Raises a ConfigError if its ranks do not divide among its hosts."""
    launch, (layout, _) = config.launch, validate(config, own_model)
    ranks_per_host, rest = divmod(layout.ranks, launch.hosts)
    if rest or not ranks_per_host:
        raise ConfigError(
            f"{layout.ranks} rank(s) do not divide among launch.hosts = {launch.hosts}",
            f"expected a multiple of {launch.hosts} ranks: try --ranks {launch.hosts * max(1, ranks_per_host)}",
        )

    @cache
    def refusal(hosts: int) -> str:
        try:
            ranks = hosts * ranks_per_host
            validate(replace(config, layout=config.layout.with_ranks(ranks)), own_model)
        except ConfigError as error:
            return f"{error.message} ({error.hint})" if error.hint else error.message
        return ""

    return HostsPolicy(
        launch.hosts,
        launch.min_hosts or launch.hosts,
        ranks_per_host,
        launch.host_timeout,
        launch.rendezvous_timeout,
        launch.resize == "checkpoint",
        refusal,
    )
