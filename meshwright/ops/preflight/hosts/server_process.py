"""The fork server of a preflight: forks the ranks of this host, which measure instead of training."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.base.config import config_from_dict
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.launch.fork_server_process import ForkServerProcess, main
from meshwright.core.launch.ranks import Ranks


class PreflightProcess(ForkServerProcess):
    """Starts ranks that measure this host and its links to the others."""

    def start_ranks(self, options: dict[str, Any]) -> Ranks:
        from meshwright.ops.preflight.run import preflight_launch, preflight_report

        placement, config = HostPlacement.from_json(options["placement"]), config_from_dict(self.request["config"])
        config = replace(config, layout=config.layout.with_ranks(placement.world_size))
        given = self.request["options"]
        self.collect_signals()
        folder, attempt = RunFolder(Path(self.request["folder"])), options["attempt"]
        args = (config, Path(given["run"]), len(placement.hosts), given["cluster"], given["seconds"])
        return Ranks(
            preflight_report,
            placement.ranks,
            args,
            preflight_launch(config, given["seconds"]),
            None,
            [folder.log(attempt, rank) for rank in placement.local_ranks],
            [folder.heartbeat(attempt, rank) for rank in placement.local_ranks],
            placement,
        )

    def summarize(self, result: Any) -> dict[str, Any]:
        return dict(result.to_json())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), PreflightProcess)
