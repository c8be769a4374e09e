"""Command-line flags made from the config dataclasses: one field is one flag, with its help and choices.

Dashes and underscores are the same in a flag's name, a bool is `--x` or `--no-x`, and a flag that does not
exist is refused with the nearest one that does. Flags of other servers have an answer in `foreign_flags`.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxserve.errors import ConfigError
from server.foreign_flags import FOREIGN


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are one line and name the nearest flag."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace=None) -> argparse.Namespace:  # type: ignore[override]
        given = [_with_dashes(arg) for arg in (sys.argv[1:] if args is None else args)]
        parsed, unknown = self.parse_known_args(given, namespace)
        if hasattr(parsed, "prompts"):  # argparse gives up on more of a list after the first flag
            parsed.prompts += [word for word in unknown if not word.startswith("-")]
            unknown = [word for word in unknown if word.startswith("-")]
        if unknown:
            # The command's own parser knows its flags; this one may only know the commands.
            getattr(parsed, "parser", self).refuse(unknown[0])
        return parsed

    def refuse(self, arg: str) -> NoReturn:
        if not arg.startswith("-"):
            self.error(f"unexpected argument {arg!r}; see {self.prog} --help")
        name = arg.split("=")[0]
        shown = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        near = difflib.get_close_matches(name, shown, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        self.error(f"there is no flag {name}; {hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_flags(parser: argparse.ArgumentParser, config: type, *, title: str, skip: Sequence[str] = ()) -> None:
    """A group of flags, one for each field of the dataclass `config` but those in `skip`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name not in skip:
            _add_flag(group, field, hints[field.name])


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Hidden flags of other servers, refused with a reason or, where harmless, answered with a warning."""
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for flag in FOREIGN:
        names = [name for name in flag.names if name not in taken]
        if names:
            parser.add_argument(
                *names,
                action=_Foreign,
                foreign=flag,
                nargs=None if flag.takes_value else 0,
                help=argparse.SUPPRESS,
            )


def config_from(args: argparse.Namespace, config: type, **given: Any) -> Any:
    """The dataclass `config` filled from its flags; `given` goes before them."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(config) if hasattr(args, f.name)}
    return config(**values | given)


def _with_dashes(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _add_flag(group, field: dataclasses.Field, hint: Any) -> None:
    inner, many = _unwrap(hint)
    names = ["--" + field.name.replace("_", "-"), *field.metadata.get("aliases", ())]
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    shown = " ".join(map(str, default)) if isinstance(default, tuple | list) else default
    told = "" if shown in (None, "", {}) else f" (default: {shown})"
    options: dict[str, Any] = {
        "dest": field.name,
        "default": default,
        "help": (field.metadata.get("help", "") + told).replace("%", "%%"),
    }
    if inner is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        return
    if many:
        options["nargs"] = "+"
        options["action"] = functools.partial(_Collect, kind=many)
    if choices := field.metadata.get("choices"):
        options["choices"] = choices
    else:
        options["metavar"] = field.metadata.get("metavar", _METAVARS.get(inner, "VALUE"))
    group.add_argument(*names, type=_READERS.get(inner, inner), **options)


def _unwrap(hint: Any) -> tuple[type, type | None]:
    """(type of one value, list or tuple when the flag takes several) of an annotation, `| None` left out."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return typing.get_args(hint)[0], origin
    return origin or hint, None


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def integer(text: str) -> int:
    """An int, also as 8k, 2Ki or 1.5M: k, M, G are powers of ten, Ki, Mi, Gi powers of two."""
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            value = float(text.removesuffix(unit)) * size
            if value != int(value):
                raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
            return int(value)
    return int(text)


_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
integer.__name__ = "int"  # what argparse calls it when it refuses a value
_READERS = {dict: _json_object, int: integer}
_METAVARS = {int: "N", float: "X", str: "TEXT", dict: "JSON"}


class _Collect(argparse.Action):
    """A flag of several values, given together or one by one."""

    def __init__(self, *args, kind: type, **kwargs):
        super().__init__(*args, **kwargs)
        self.kind = kind

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        kept = () if before is self.default else before or ()
        setattr(namespace, self.dest, self.kind([*kept, *values]))  # type: ignore[misc]


class _Foreign(argparse.Action):
    """A flag of another server: a warning where leaving it out changes nothing, else a refusal."""

    def __init__(self, option_strings, dest, foreign, **kwargs):
        super().__init__(option_strings, argparse.SUPPRESS, **kwargs)
        self.foreign = foreign

    def __call__(self, parser, namespace, values, option_string=None):
        text = f"{option_string} {values}" if isinstance(values, str) else str(option_string)
        if self.foreign.harmless is True or (isinstance(values, str) and values in self.foreign.harmless):
            parser._print_message(
                f"{parser.prog}: warning: {text} has no effect: {self.foreign.reason}\n", sys.stderr
            )
            return
        raise ConfigError(f"{text} is not supported: {self.foreign.reason}")
