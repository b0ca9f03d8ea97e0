"""Declares the arguments of a verb in its signature, and parses a command line into them.

A verb is a plain function. The annotation of each parameter carries its help:

    def verb(run: Annotated[Path, positional("RUN", "run folder")], json: Json = False) -> None: ...

A verb with an `overrides` parameter also accepts every config key as an option, such as `--optimizer.lr 3e-4`, and a
verb with an `entry_points` parameter accepts the options that name a user's model, loss and data; with a
`training_entry_points` parameter, also those that name an update, a reward and callbacks.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, NoReturn, Union, get_args, get_origin, get_type_hints

from meshwright.errors import ConfigError

Verb = Callable[..., None]


@dataclass(frozen=True)
class Argument:
    """How one parameter of a verb appears on the command line."""

    help: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    positional: bool = False


def positional(metavar: str, help: str) -> Argument:
    return Argument(help, metavar, positional=True)


def option(metavar: str, help: str, *aliases: str) -> Argument:
    return Argument(help, metavar, aliases)


def flag(help: str) -> Argument:
    return Argument(help)


Json = Annotated[bool, flag("print the result as JSON to standard output")]
RunFile = Annotated[
    Path | None, positional("RUN.toml", "run file: settings that differ from the preset; or a run folder")
]
Run = Annotated[Path, positional("RUN", "run folder, or a run file for a run that has not started")]
Ranks = Annotated[str | None, option("N", "number of ranks; sets layout.replicate accordingly")]
AtStep = Annotated[int | None, option("N", "checkpoint after N steps (default: the newest)")]


ENTRY_POINTS = {
    "model": "model to use instead of the built-in one: an nn.Module, or a function or class that builds it",
    "loss": "loss of --model, as a function or a module",
    "source": "map-style dataset to use instead of the configured data, or a function or class that opens it",
    "collate": "function that makes a batch of a list of samples",
    "metrics": "dict of metrics of --model: name -> function",
    "parallel_spec": "ParallelSpec of --model, where the inferred one does not do",
    "init": "function that initializes the parameters of a --model on the meta device",
}
"""Arguments that name an object of the user's code as MODULE:NAME -> help."""
TRAINING_ENTRY_POINTS = {
    "optimizer": "optimizer of your own: a function of parameter groups that makes it",
    "schedule": "schedule of your own: a function of (step, steps), a multiple of optimizer.lr",
    "reward": "reward of your own (rl.objective): a function of (item, completion) that returns a number",
    "callbacks": "callback of the run, a list of callbacks, or a function that makes them",
}
"""The same for the verbs that start a run."""
Reduction = Annotated[
    Literal["sum", "mean"] | None, option("sum|mean", "what --loss returns: the sum over valid targets, or their mean")
]
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
RunLocation = NewType("RunLocation", str)
"""The path of a run folder, or the URL of a run in an object store."""
RUN_ARGUMENTS = ("RUN", "OTHER")
"""The arguments that may be the URL of a run in an object store."""
NO_ENTRY_POINTS: Mapping[str, str] = types.MappingProxyType({})


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports a mistake as a ConfigError and adds the config keys to the help of a verb."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.options = {"-h", "--help"}
        self.accepts_config_keys = False
        self.entry_points: dict[str, tuple[str, ...]] = {}
        """parameter of the verb -> the options that it gets"""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, f"try {self.prog} --help")

    def format_help(self) -> str:
        return super().format_help() + ("\n" + config_keys_help() if self.accepts_config_keys else "")


def parse(verb: Verb, name: str, args: Sequence[str]) -> dict[str, Any]:
    """Parses the arguments of a verb into the keyword arguments of its function.

    argparse cannot collect the config keys itself: it would take the value of an option that it does not know, as in
    `--optimizer.lr 3e-4`, for a positional argument.
    """
    parser = build_parser(verb, name)
    values: dict[str, Any] = {}
    remaining = [hyphenated(arg) for arg in args]
    if parser.accepts_config_keys:
        remaining, values["overrides"] = split_overrides(args, parser.options)
    namespace, unknown = parser.parse_known_args(remaining)
    if unknown:
        close = difflib.get_close_matches(unknown[0].partition("=")[0], parser.options, n=1)
        kind = "option" if unknown[0].startswith("-") else "argument"
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"unknown {kind} {unknown[0]}", f"{hint}try {parser.prog} --help")
    values = vars(namespace) | values
    for parameter, arguments in parser.entry_points.items():
        typed = {argument: values.pop(argument) for argument in arguments}
        values[parameter] = {argument: text for argument, text in typed.items() if text is not None}
    return values


def build_parser(verb: Verb, name: str) -> Parser:
    """Builds the parser of a verb from the signature of its function."""
    summary = (inspect.getdoc(verb) or "").partition(": ")[2]
    parser = Parser(prog=f"meshwright {name}", description=summary[:1].upper() + summary[1:], allow_abbrev=False)
    hints = get_type_hints(verb, include_extras=True)
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.name == "overrides":
            parser.accepts_config_keys = True
        elif parameter.name in ("entry_points", "training_entry_points"):
            more = TRAINING_ENTRY_POINTS if parameter.name == "training_entry_points" else {}
            parser.entry_points[parameter.name] = (*more, *ENTRY_POINTS, "reduction")
            for argument, text in (more | ENTRY_POINTS).items():
                add_argument(parser, argument, Annotated[str | None, option("MODULE:NAME", text)], None)
            add_argument(parser, "reduction", Reduction, None)
        else:
            add_argument(parser, parameter.name, hints[parameter.name], parameter.default)
    return parser


def add_argument(parser: Parser, name: str, hint: Any, default: Any) -> None:
    """Adds the parameter `name` of a verb to its parser; `hint` is Annotated[type, Argument]."""
    kind, argument = get_args(hint)[:2]
    required = default is inspect.Parameter.empty
    shown_default = "" if required or default in (None, False, ()) else f" (default: {default})"
    add = partial(parser.add_argument, help=argument.help + shown_default)
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    many = get_origin(kind) is tuple
    value_type = get_args(kind)[0] if many else kind
    if value_type is Path:
        value_type = parse_run if argument.metavar in RUN_ARGUMENTS and argument.positional else parse_path
    elif value_type is RunLocation:
        value_type = parse_location
    choices = get_args(kind) if get_origin(kind) is Literal else None
    if argument.positional:
        add(name, metavar=argument.metavar, type=value_type, nargs="+" if many else None if required else "?")
        return
    strings = ("--" + name.rstrip("_").replace("_", "-"), *argument.aliases)  # `try_`: a keyword of Python
    parser.options.update(strings)
    if kind is bool:
        add(*strings, dest=name, action="store_true")
    elif many and required:  # an option that is given once per value
        add(*strings, dest=name, metavar=argument.metavar, type=value_type, action="append", required=True)
    else:
        add(
            *strings,
            dest=name,
            metavar=argument.metavar,
            type=str if choices else value_type,
            choices=choices,
            nargs="*" if many else None,
            required=required,
            default=None if required else default,
        )


def parse_path(text: str) -> Path:
    """Parses a path. Empty text, the value of a shell variable that is not set, would be the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    if URL.match(text):
        raise argparse.ArgumentTypeError("a URL is not a path; only runs can be in an object store")
    return Path(text)


def parse_location(text: str) -> RunLocation:
    """Parses the path or URL of a run that is trained."""
    return RunLocation(text if URL.match(text) else str(parse_path(text)))


def parse_run(text: str) -> Path:
    """Parses the path of a run, or the URL of one: its records are fetched into a local mirror, which is returned."""
    if not URL.match(text):
        return parse_path(text)
    from meshwright.base.store.mirror import resolve_run

    return resolve_run(text)


def split_overrides(args: Sequence[str], options: set[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separates `--KEY=VALUE` and `--KEY VALUE` of config keys from the other arguments of a verb.

    A key is an option with a dot, or a setting at the top level of a run file that is not an option of the verb itself.
    Hyphens and underscores are equivalent in names.
    """
    top_level = {f"--{key}" for key in top_level_keys()}
    remaining: list[str] = []
    overrides: list[str] = []
    iterator = iter(args)
    for arg in iterator:
        name, equals, value = arg.partition("=")
        key = "--" + name[2:].replace("-", "_")
        is_key = name.startswith("--") and ("." in name or (key in top_level and hyphenated(name) not in options))
        if not is_key:
            remaining.append(hyphenated(arg))
            continue
        if not equals:
            following = next(iterator, None)
            if following is None:
                raise ConfigError(f"{name} has no value", f"expected {name} VALUE")
            value = following
        overrides.append(f"{key}={value}")
    return remaining, tuple(overrides)


def hyphenated(arg: str) -> str:
    """Spells the name of an option with hyphens: `--critical_batch=1` is `--critical-batch=1`."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def top_level_keys() -> list[str]:
    """Lists the config keys that are not in a section, such as seed."""
    import dataclasses

    from meshwright.base.config import RunConfig

    return [f.name for f in dataclasses.fields(RunConfig) if not dataclasses.is_dataclass(getattr(RunConfig(), f.name))]


def config_keys_help() -> str:
    """Describes every config key with its type, default and meaning."""
    from meshwright.base.config.reference import describe_config

    formatter = partial(argparse.HelpFormatter, max_help_position=8)
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=formatter)
    for section in describe_config():
        group = parser.add_argument_group(
            f"{section.name} settings" if section.name else "config keys, in a run file or as --KEY=VALUE",
            section.help if section.name else None,
        )
        for key in section.keys:
            text = f"{key.help} (default: {key.default})".replace("%", "%%")
            group.add_argument(f"--{key.key}", metavar=key.type, help=text)
    return parser.format_help()
