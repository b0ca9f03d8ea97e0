"""Checks by arithmetic that the shards of the real layout partition every tensor, and who saves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product

import torch

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import block_costs, run_spec
from meshwright.base.models.spec import ParameterSpec
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, state_tensors, update_rule
from meshwright.base.topology.parameter_shapes import ParameterShape
from meshwright.base.topology.parameter_shards import pipeline_placement
from meshwright.core.checkpoint.shards import TENSOR_ALIGNMENT
from meshwright.core.checkpoint.stager import assign_shards
from meshwright.core.checkpoint.verify import SHARD_HEADER_BYTES
from meshwright.core.parallel.local_shard import LocalShard
from meshwright.prover.claims import Claim
from meshwright.prover.state.checkpoint_content import CheckpointContent

Region = tuple[tuple[int, int], ...]
"""(start, end) in every dimension."""

MAX_COMPARED_RANKS = 8
"""The most ranks whose assignment of shards to files is computed."""
MAX_REPLICAS = 64
"""The most ranks with the same shard among which the one that saves it is looked for."""


def check_real_layout(config: RunConfig) -> Claim:
    """The regions of all ranks of the user's own layout at the user's own sizes: nothing is run."""
    layout = Layout.from_config(config.layout)
    ranks = [rank for rank in range(layout.ranks) if layout.is_first_on(rank, ["replicate"])]
    problems = list(misplaced_blocks(config, layout))
    distinct = {(p.shape, p.tp_dim, p.is_expert_weight): p for p in run_spec(config).parameters}
    for parameter in distinct.values():
        regions = {shard_region(parameter, layout, rank) for rank in ranks}
        if problem := find_gap(parameter.shape, regions):
            problems.append(f"{parameter.name} {list(parameter.shape)}: {problem}")
    compared = spread(layout.ranks, MAX_COMPARED_RANKS)
    largest = left_out = 0
    for rank in compared:
        size, skipped, problem = check_assignment(config, layout, rank)
        largest, left_out = max(largest, size), left_out + skipped
        problems += [problem] if problem else []
    parameters = len(run_spec(config).parameters)
    measured = f"{parameters} parameters, {layout.ranks} ranks; the files of {len(compared)} ranks were compared"
    if left_out:
        measured += f", without {left_out} shards that more than {MAX_REPLICAS} ranks have"
    return Claim(
        f"on the real layout ({layout}) at the real sizes, the shards of all ranks partition every tensor, and each "
        "compared shard is saved once",
        not problems,
        "; ".join([*problems[:2], f"{measured}, the largest has {largest:,} bytes"]),
    )


def misplaced_blocks(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Blocks that do not belong to exactly one pipeline rank."""
    owners: dict[int, list[int]] = {block: [] for block in range(config.model.layers)}
    for coordinate in range(layout.pipeline):
        placement = pipeline_placement(config, layout, coordinate * layout.stride("pipeline"), block_costs(config))
        for blocks in placement.stages.values():
            for block in blocks:
                owners[block].append(coordinate)
    for block, coordinates in owners.items():
        if len(coordinates) != 1:
            yield f"block {block} is on pipeline ranks {coordinates}"


def shard_region(parameter: ParameterShape, layout: Layout, rank: int) -> Region:
    """The region of a parameter that a rank has between steps. Tensor and expert parallelism divide a dimension evenly;
    FSDP2 then divides the rows of what is left, the last shards being shorter.
    """
    coordinates = layout.coordinates(rank)
    region = [[0, size] for size in parameter.shape]
    if parameter.tp_dim is not None:
        divide(region[parameter.tp_dim], layout.tensor, coordinates["tensor"])
    divides_experts = parameter.is_expert_weight and layout.expert > 1
    if divides_experts:
        divide(region[0], layout.expert, coordinates["expert"])
    if layout.shard > 1:
        shards = layout.shard * layout.context
        index = coordinates["shard"] * layout.context + coordinates["context"]
        if divides_experts:
            shards, index = shards // layout.expert, coordinates["expert_shard"]
        divide(region[shard_dim(parameter, layout)], shards, index)
    return tuple((start, end) for start, end in region)


def divide(interval: list[int], parts: int, index: int) -> None:
    """Shortens an interval to one of its parts: equal ones, except that the last may be shorter or empty."""
    start, end = interval
    part = -(-(end - start) // parts)
    interval[:] = min(end, start + part * index), min(end, start + part * (index + 1))


def find_gap(shape: tuple[int, ...], regions: Iterable[Region]) -> str:
    """Why regions do not partition a tensor, or ''. They are a grid: all combinations of intervals that partition their
    dimension.
    """
    present = filled(regions)
    by_dim = [sorted({region[dim] for region in present}) for dim in range(len(shape))]
    for dim, intervals in enumerate(by_dim):
        edges = [0, *(edge for interval in intervals for edge in interval), shape[dim]]
        if any(before != after for before, after in zip(edges[::2], edges[1::2], strict=True)):
            return f"dimension {dim} is divided at {edges[1:-1]}"
    missing = set(product(*by_dim)) - present
    return f"no rank has {next(iter(missing))}" if missing else ""


def filled(regions: Iterable[Region]) -> set[Region]:
    """The regions with at least one element: with more ranks than rows, some ranks have none."""
    return {region for region in regions if all(start < end for start, end in region)}


def check_assignment(config: RunConfig, layout: Layout, rank: int) -> tuple[int, int, str]:
    """(the size of the file of a rank, the shards that too many ranks have, what is wrong): of the ranks with the same
    shard, exactly one saves it, and aligned regions in the order of the file do not overlap.
    """
    shards = meta_shards(config, layout, rank)
    left_out = 0
    for axes in {shard.sharded_axes for shard in shards.values()}:
        savers: dict[str, list[int]] = {name: [] for name, shard in shards.items() if shard.sharded_axes == axes}
        group = layout.replica_group(rank, axes)
        if len(group) > MAX_REPLICAS:
            left_out += len(savers)
            continue
        for member in group:
            for name in assign_shards(shards, layout, member):
                if name in savers:
                    savers[name].append(member)
        if wrong := [name for name, members in savers.items() if len(members) != 1]:
            return 0, left_out, f"{wrong[0]} is saved by ranks {savers[wrong[0]]} of {group}"
    end, starts = SHARD_HEADER_BYTES, []
    for name in assign_shards(shards, layout, rank):
        local = shards[name].local
        start = -(-end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        starts.append((start, end := start + local.numel() * local.element_size()))
    overlapping = any(before[1] > after[0] for before, after in pairwise(starts))
    return end, left_out, f"regions of rank {rank} overlap in its file" if overlapping or end >= 1 << 63 else ""


def meta_shards(config: RunConfig, layout: Layout, rank: int) -> dict[str, LocalShard]:
    """The local shards of a rank at real sizes, without memory."""
    placement = pipeline_placement(config, layout, rank, block_costs(config))
    local_blocks = {block for blocks in placement.stages.values() for block in blocks}
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    shards = {}
    for parameter in run_spec(config).parameters:
        if not is_on_stage(parameter, local_blocks, placement.has_first_stage, placement.has_last_stage):
            continue
        region = shard_region(parameter, layout, rank)
        for name, dims in stored_tensors(config, parameter):
            local = torch.empty([region[dim][1] - region[dim][0] for dim in dims], dtype=dtype, device="meta")
            shape, offset = (tuple(parameter.shape[dim] for dim in dims), tuple(region[dim][0] for dim in dims))
            shards[name] = LocalShard(local, shape, offset, sharded_axes(parameter, layout, dims))
    return shards


def is_on_stage(parameter: ParameterShape, blocks: set[int], first: bool, last: bool) -> bool:
    """Whether a pipeline rank with these blocks has a parameter; a tied head belongs to the first stage."""
    if parameter.name.startswith("decoder.blocks."):
        return int(parameter.name.split(".")[2]) in blocks
    return first if parameter.name == "decoder.embedding.weight" else last


def stored_tensors(config: RunConfig, parameter: ParameterSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that a checkpoint has of a parameter, with the dimensions of the parameter that each of them has: the
    parameter and its optimizer state, without numbers.
    """
    if not parameter.trainable:  # a checkpoint refers to it by its digest
        return
    dims = tuple(range(len(parameter.shape)))
    yield f"model/{parameter.name}", dims
    rule = update_rule(config.optimizer, parameter.name, parameter.shape, parameter.unit not in OUTSIDE_BLOCKS)
    for tensor in state_tensors(config.optimizer, rule, parameter.shape):
        if tensor.dims or not dims:
            yield f"optimizer/{parameter.name}/{tensor.key}", tensor.dims


def sharded_axes(parameter: ParameterShape, layout: Layout, dims: tuple[int, ...]) -> frozenset[str]:
    """The axes that shard these dimensions of a parameter."""
    axes = {"tensor"} if parameter.tp_dim in dims and layout.tensor > 1 else set()
    divides_experts = parameter.is_expert_weight and layout.expert > 1
    axes |= {"expert"} if divides_experts and 0 in dims else set()
    if layout.shard > 1 and shard_dim(parameter, layout) in dims:
        axes |= {"expert_shard"} if divides_experts else {"shard", "context"} if layout.context > 1 else {"shard"}
    return frozenset(axes)


def shard_dim(parameter: ParameterShape, layout: Layout) -> int:
    """The dimension that FSDP2 divides: the rows. With fewer experts than shards, it divides the rows of each expert
    instead, if it can do so evenly.
    """
    sizes = list(parameter.shape)
    if parameter.tp_dim is not None:
        sizes[parameter.tp_dim] //= layout.tensor
    shards = layout.shard * layout.context
    if parameter.is_expert_weight and layout.expert > 1:
        sizes[0], shards = sizes[0] // layout.expert, shards // layout.expert
    return 1 if len(sizes) == 3 and sizes[0] < shards and sizes[1] % shards == 0 else 0


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` ranks, evenly spread."""
    return sorted({index * count // min(count, limit) for index in range(min(count, limit))})


def compare_regions(content: CheckpointContent, config: RunConfig) -> Iterator[str]:
    """Differences between the regions of a checkpoint and those that arithmetic predicts for its layout, and regions
    that overlap or are not aligned in their files.
    """
    layout = Layout.from_config(config.layout)
    tensors, files = content.manifest["tensors"], content.manifest["files"]
    for parameter in run_spec(config).parameters:
        regions = filled(shard_region(parameter, layout, rank) for rank in range(layout.ranks))
        for name, dims in stored_tensors(config, parameter):
            predicted = {tuple(region[dim] for dim in dims) for region in regions}
            if name not in tensors:
                yield f"{name} is missing"
                continue
            pieces = tensors[name]["pieces"]
            stored = {tuple((o, o + s) for o, s in zip(p["offset"], p["shape"], strict=True)) for p in pieces}
            if stored != predicted or len(pieces) != len(stored):
                yield f"{name} is stored as {sorted(stored)[:2]} ..., expected {sorted(predicted)[:2]} ..."
    by_file: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for record in tensors.values():
        for piece in record["pieces"]:
            by_file[piece["file"]].append((piece["start"], piece["start"] + piece["length"]))
    for file, ranges in by_file.items():
        ranges.sort()
        ends = [SHARD_HEADER_BYTES, *(end for _, end in ranges)]
        if any(start % TENSOR_ALIGNMENT or start < end for (start, _), end in zip(ranges, ends, strict=False)):
            yield f"regions in {file} overlap or are not aligned"
        size = (content.folder / file).stat().st_size
        if {size, files[file]["size"]} != {ends[-1]}:
            yield f"{file} has {size} bytes ({files[file]['size']} in the manifest), its regions end at {ends[-1]}"
