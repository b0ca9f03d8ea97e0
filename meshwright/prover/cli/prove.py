"""`meshwright prove`: checks the contracts of a config on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, Ranks, RunFile, flag, option


def prove(
    file: RunFile = None,
    out: Annotated[Path, option("FILE", "file to write the certificate to")] = Path("certificate.json"),
    ranks: Ranks = None,
    full: Annotated[bool, flag("prove the configured runs in full size; only the number of steps shrinks")] = False,
    device: Annotated[
        Literal["cuda"] | None,
        option(
            "cuda",
            "prove on the CUDA devices of this machine, and also prove every axis there by itself, on 2 and 4 ranks, "
            "in bf16 and float32, compiled and not",
        ),
    ] = None,
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
    overrides: tuple[str, ...] = (),
) -> None:
    """Prove: check the stream, training, communication and recovery contracts of a config, and write a certificate."""
    from meshwright.base.io import output_file
    from meshwright.base.models.initial_model import load_run_config
    from meshwright.base.topology.unsupported import validate
    from meshwright.base.user_code.entry_points import load_user_code

    if device is not None:
        overrides = (*overrides, f"--launch.device={device}")
    config = load_run_config(file, overrides, ranks, own_model="model" in entry_points)
    validate(config, own_model="model" in entry_points)
    output_file(out, "--out")
    from meshwright.core.launch.user_code.make_custom_model import open_model_with_values, torch_seed
    from meshwright.prover.policy.proof import require_built_in_policy
    from meshwright.prover.prove import prove as prove_config

    require_built_in_policy(config, entry_points)
    with torch_seed(config.seed):
        user = load_user_code(entry_points)
    config, custom, sources = open_model_with_values(config, user)
    proven = prove_config(
        config, out, as_json=json, full=full, custom=custom, sources=sources, on_device=device is not None
    )
    if not proven:
        raise SystemExit(1)
