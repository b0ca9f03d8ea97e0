"""The table of words by which an answer is read, and whether a word in it is denied. Nothing else judges the words."""

from __future__ import annotations

import re

STRATEGIES: dict[str, str] = {
    "checkpointing": r"(?:activation|gradient)[- ]checkpoint\w*|recomput\w+|re-?materiali[sz]\w+|\bAC\b",
    "selective": r"\bselective\w*",
    "fsdp": r"\bFSDP2?\b|fully[- ]shard\w*|zero[- ]?3|shard\w* (?:the |all )?parameters|parameter shard\w+",
    "zero": (
        r"zero[- ]?[12]\b|\bZeRO\b(?![- ]?3)|shard\w* (?:the )?(?:optimizer|gradients)|(?:optimizer|gradient) shard\w+"
    ),
    "tensor": r"tensor[- ]parallel\w*|\bTP ?\d*\b",
    "pipeline": r"pipeline[- ]parallel\w*|\bPP ?\d*\b|(?:more|add\w*) (?:pipeline )?stages",
    "context": r"context[- ]parallel\w*|ring attention|\bCP ?\d*\b",
    "accumulation": r"accumulat\w+|no_sync|larger global batch|fewer synchroni[sz]ations",
    "micro_batches": r"more micro-?batches|(?:increase|raise|larger) (?:the )?number of micro-?batches|accumulat\w+",
    "micro_batch": r"larger micro-?batch|micro-?batch (?:size )?(?:of )?4|bigger micro-?batch",
    "interleaved": r"interleav\w+|virtual stages|(?:several|two|2) stages per rank|zero[- ]bubble",
    "bf16_reduction": (
        r"bf16_compress\w*|(?:bf16|bfloat16)[- ](?:gradient[- ])?(?:all-?)?(?:reduc|compress)\w*|"
        r"(?:reduc|compress|synchroni[sz])\w*[^.;]{0,30}\b(?:in|to|as)\s+(?:bf16|bfloat16)\b"
    ),
    "offload": r"\bofflo\w+",
    "expert": r"expert[- ]parallel\w*",
    "quantize": r"quanti[sz]\w+|\bint8\b|\bfp8\b",
    "ddp": r"\bDDP\b|data[- ]parallel\w*",
}
"""strategy -> pattern. `ddp` is the base of every case and never counts as a remedy."""

STATE: dict[str, str] = {
    "checkpointing": r"activation",
    "selective": r"activation",
    "fsdp": r"parameter|weight|gradient|optimizer|moment",
    "zero": r"gradient|optimizer|moment",
    "tensor": r"matri\w+|weight|heads|column|row",
    "pipeline": r"layer|stage|block",
    "context": r"token|sequence|key|attention",
    "accumulation": r"gradient|activation",
    "micro_batches": r"micro-?batch|activation",
    "micro_batch": r"activation",
    "interleaved": r"layer|stage|activation",
    "bf16_reduction": r"gradient",
}
"""strategy -> the state that it moves, shards, keeps or computes again"""

COLLECTIVES: dict[str, str] = {
    "all_reduce": r"all-?_?\s?reduce",
    "all_gather": r"all-?_?\s?gather",
    "reduce_scatter": r"reduce-?_?\s?scatter",
    "send": r"point-to-point|\bp2p\b|\bsend/rec\w*|\bsends? and rec\w*|\bisend|\birecv|sends? to the next",
    "all_to_all": r"all-?_?\s?to-?_?\s?all",
    "broadcast": r"broadcast",
}

PRICES: dict[str, str] = {
    "checkpointing": r"recomput|comput|flop|slower|forward again|time",
    "selective": r"recomput|comput|flop|slower|forward again|time",
    "fsdp": r"communicat|bytes|gather|traffic|network|latency|complex",
    "zero": r"communicat|bytes|gather|traffic|network|latency|complex|scatter",
    "tensor": r"communicat|critical path|latency|exposed|gather|bytes",
    "pipeline": r"bubble|idle|schedul|fill|drain",
    "context": r"communicat|bytes|ring|latency|send",
    "accumulation": r"optimi[sz]|learning rate|converge|fewer updates|critical batch|larger (?:global )?batch",
    "micro_batches": r"optimi[sz]|learning rate|converge|fewer updates|critical batch|larger (?:global )?batch|memory",
    "micro_batch": r"memory|activation|optimi[sz]|learning rate|converge",
    "interleaved": r"communicat|send|memory|activation|complex",
    "bf16_reduction": r"precision|round|numeric|mantissa|digits|accura|converge",
}
"""strategy -> the words for what it costs"""

LIMITS: dict[str, str] = {
    "memory": r"memory|does not fit|out of memory|\bOOM\b|exceeds|overflow",
    "communication": r"communicat|all-?_?reduce|network|exposed|bandwidth",
    "bubble": r"bubble|idle|wait",
    "batch": r"step (?:time|takes)|seconds per step|tokens per second|not (?:a |an )?(?:\w+ )?fix|no time is lost",
}

METRICS = (
    r"step time|seconds per step|tokens?/s|tokens per second|throughput|\bMFU\b|peak memory|reserved memory|"
    r"max_memory|memory_allocated|memory_reserved|exposed|bubble (?:share|fraction|time)|goodput|"
    r"loss (?:per|over|against|vs)|"
    r"bytes (?:per|sent)|counters?|profiler|trace"
)

NEGATION_BEFORE = re.compile(
    r"\b(?:not|no|never|without|don't|doesn't|isn't|won't|can't|cannot|avoid|instead of|rather than|neither|nor|unlike|"
    r"skip|reject\w*|rule[sd]? out)\b",
    re.IGNORECASE,
)
NEGATION_AFTER = re.compile(
    r"^\W*(?:\w+\W+){0,3}?(?:(?:is|are|was|does|do|did|would|will|can|could|should)(?:n't| not)\b|cannot\b|"
    r"is (?:unnecessary|wrong|useless|worse)\b|fails\b|never\b)",
    re.IGNORECASE,
)
CLAUSE = re.compile(r"[.;:!?\n]|,? but |,? because |, (?:so|and|then) ", re.IGNORECASE)
WINDOW = 8
"""Words before a match in which a negation counts."""


def clauses(text: str) -> list[str]:
    """The clauses of a text. A decimal point does not end one."""
    protected = re.sub(r"(?<=\d)[.,](?=\d)", "\0", text)
    return [clause.replace("\0", ".") for clause in CLAUSE.split(protected)]


def asserted(pattern: str, text: str) -> bool:
    """Whether a pattern occurs in a text in a clause that does not deny it."""
    compiled = re.compile(pattern, re.IGNORECASE)
    for clause in clauses(text):
        for match in compiled.finditer(clause):
            before = " ".join(clause[: match.start()].split()[-WINDOW:])
            if not NEGATION_BEFORE.search(before) and not NEGATION_AFTER.match(clause[match.end() :]):
                return True
    return False


def asserted_names(table: dict[str, str], text: str) -> list[str]:
    return [name for name, pattern in table.items() if asserted(pattern, text)]
