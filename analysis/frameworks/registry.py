"""Find frameworks. Each framework is a module in this package with an SQL file of the same name.

The module assigns the framework's class to FRAMEWORK, and the fields of the class are the framework's options. It may
also define `register(connection)`, which registers SQL functions. The SQL file defines
`<module>_numbers(a, b, by_step, {options})`, or both `<module>_runs(a, b)` and `<module>_steps(a, b)`. Command-line
options and macro parameters are derived from these two files. No other code depends on a framework; alarms/reading.py,
correction.py and diagnosis/figures.py only cite frameworks as sources.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, get_args, get_type_hints

from ...schemas.errors import InvalidOption, option
from ...schemas.lazy import check_arguments
from ..trace.macros import MacroFile
from .framework import literal

if TYPE_CHECKING:
    from ..trace.database import Database
    from .framework import Framework


_CASTS: dict[object, str] = {bool: "", int: "", float: "::DOUBLE", str: "::VARCHAR"}
"""SQL casts for option values. Integers and booleans are left uncast, because DuckDB rejects aggregates over casts."""


class _Frameworks(Mapping[str, "type[Framework]"]):
    def __getitem__(self, name: str) -> type[Framework]:
        found: type[Framework] = _module(name).FRAMEWORK
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_files())

    def __len__(self) -> int:
        return len(_files())


FRAMEWORKS = _Frameworks()


def framework_of(name: str, options: Mapping[str, object]) -> Framework:
    """Create a framework from the options that are not None. Options of other frameworks must be None or False."""
    check_name(name)
    given = {key: value for key, value in options.items() if value is not None}
    own = options_of(name)
    for key, value in given.items():
        if key not in own and value is not False:
            raise InvalidOption(f"{name} has no such option; {_whose(key)}", option=key)
    chosen = {key: value for key, value in given.items() if key in own}
    check_arguments(FRAMEWORKS[name], chosen, name=name)
    return FRAMEWORKS[name](**chosen)


def refuse_options(options: Mapping[str, object]) -> None:
    for key, value in options.items():
        if value is not None and value is not False:
            raise InvalidOption(f"needs a framework; {_whose(key)}" if _owners(key) else "no such option", option=key)


def check_name(name: str) -> None:
    if name not in FRAMEWORKS:
        raise InvalidOption(f"got {name!r}; use one of {', '.join(FRAMEWORKS)}", option="like")


def options_of(name: str) -> tuple[str, ...]:
    return tuple(field.name for field in fields(FRAMEWORKS[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredOption:
    framework: str
    name: str
    type: object
    default: object
    help: str
    metavar: str | None


def declared_options() -> list[DeclaredOption]:
    return [one for name in FRAMEWORKS for one in _declared(name)]


def _declared(name: str) -> Iterator[DeclaredOption]:
    hints = get_type_hints(FRAMEWORKS[name])
    for field in fields(FRAMEWORKS[name]):
        kinds = get_args(hints[field.name])
        yield DeclaredOption(
            framework=name, name=field.name, type=kinds[0] if NoneType in kinds else hints[field.name], default=field.default,
            help=field.metadata.get("help", ""), metavar=field.metadata.get("metavar"),
        )  # fmt: skip


def macro_files() -> list[MacroFile[Database]]:
    return [
        MacroFile(name=name, sql=macros(name), define=partial(_define, name), is_listed=False) for name in FRAMEWORKS
    ]


def _define(name: str, database: Database) -> None:
    module, connection, every = _module(name), database.connection.raw, list(_declared(name))
    if hasattr(module, "register"):
        module.register(connection)
    filled = {
        "parameters": ", ".join(f"{one.name} := {literal(one.default)}" for one in every),
        "options": ", ".join(f"{one.name}{_CASTS.get(one.type, '::DOUBLE[]')}" for one in every),
        "columns": FRAMEWORKS[name].columns,
    }
    sql = macros(name)
    for placeholder, text in filled.items():
        sql = sql.replace(f", {{{placeholder}}}", f", {text}" if text else "").replace(f"{{{placeholder}}}", text)
    connection.execute(sql)


_BOTH = """
CREATE OR REPLACE MACRO {prefix}_steps(a, b, {{parameters}}) AS TABLE
    SELECT * FROM {prefix}_numbers(a, b, true, {{options}});

CREATE OR REPLACE MACRO {prefix}_runs(a, b, {{parameters}}) AS TABLE
    SELECT * EXCLUDE (step) FROM {prefix}_numbers(a, b, false, {{options}});
"""


@cache
def macros(name: str) -> str:
    """Return a framework's SQL, which contains the placeholders {parameters}, {options} and {columns}."""
    file = _files()[name]
    sql = file.read_text(encoding="utf-8")
    return sql if f"MACRO {file.stem}_steps" in sql else sql + _BOTH.format(prefix=file.stem)


@cache
def _files() -> dict[str, Path]:
    folders = [Path(folder) for folder in import_module(__package__).__path__]
    files = [folder / f"{name}.sql" for folder in folders for _, name, _ in pkgutil.iter_modules([str(folder)])]
    return {file.stem.replace("_", "-"): file for file in files if file.exists()}


def _module(name: str) -> ModuleType:
    return import_module(f".{_files()[name].stem}", __package__)


def _owners(name: str) -> list[str]:
    return [framework for framework in FRAMEWORKS if name in options_of(framework)]


def _whose(name: str) -> str:
    if not (owners := _owners(name)):
        return "no framework has it"
    return f"it belongs to {' and '.join(owners)}; drop it or use {option('like', owners[0])}"
