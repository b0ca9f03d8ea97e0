"""`meshwright prove`: checks the contracts of a config on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.cli.args import Json, Ranks, RunFile, flag, option


def prove(
    file: RunFile = None,
    out: Annotated[Path, option("FILE", "file to write the certificate to")] = Path("certificate.json"),
    ranks: Ranks = None,
    full: Annotated[bool, flag("prove the configured runs in full size; only the number of steps shrinks")] = False,
    json: Json = False,
    *,
    overrides: tuple[str, ...] = (),
) -> None:
    """Prove: check the stream, training, communication and recovery contracts of a config, and write a certificate."""
    from meshwright.config import load_config
    from meshwright.io import output_file
    from meshwright.topology.unsupported import validate

    config = load_config(file, overrides, ranks)
    validate(config)
    output_file(out, "--out")
    from meshwright.prover.prove import prove as prove_config

    if not prove_config(config, out, as_json=json, full=full):
        raise SystemExit(1)
