"""YAML that users write: read whole or refused in one line, and on which line a fault stands."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gccompress.errors import GccompressError


def read_yaml_text(
    path: Path,
    *,
    kind: str,
    largest: int,
    hint: str,
    missing: str,
    error: type[GccompressError] = GccompressError,
) -> str:
    """Return the text of a YAML file of a user.

    Args:
        path: the file.
        kind: what it should be, in a word, such as `plan`.
        largest: bytes beyond which it cannot be one.
        hint: what was wanted of a file that is larger, in words.
        missing: what to do where there is no file, in words.
        error: class of what is raised.

    Raises:
        GccompressError: as `error`; not there, too large, not readable, not UTF-8.
    """
    try:
        if path.stat().st_size > largest:
            raise error(f"{path}: larger than any {kind}; wanted {hint}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"no {kind} at {path}; {missing}") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise error(f"{path}: not readable as a {kind} ({fault})") from fault


def load_yaml(text: str, name: str, error: type[GccompressError] = GccompressError) -> Any:
    """Return what a YAML text holds; one that is none raises `error`, naming `name` and the line.

    Aliases, tags of code and keys given twice are refused.
    """
    try:
        return yaml.load(text, Loader=NoAliasLoader)  # noqa: S506 - a SafeLoader subclass
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        words = ", ".join(part for part in (fault.context, fault.problem) if part)
        raise error(f"{name}: {where}not YAML: {' '.join(words.split())}") from fault
    except yaml.YAMLError as fault:
        raise error(f"{name}: not YAML: {' '.join(str(fault).split())}") from fault
    except (ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as fault:
        # From a value that is not what its tag says, such as `!!bool x`, or from deep nesting.
        words = " ".join(str(fault).split())
        raise error(
            f"{name}: not YAML: a value cannot be read ({type(fault).__name__}: {words})"
        ) from fault


def line_of(text: str, place: Sequence[str | int]) -> int:
    """Return the line, from 1, on which a leaf of a YAML text stands.

    `place` is a path of keys and indices. Parts that are not in the text are passed over, so that
    a missing key is where its mapping is, and pydantic's names of union members do not matter.
    """
    node = yaml.compose(text, Loader=NoAliasLoader)
    line = 0 if node is None else node.start_mark.line
    for part in place:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    node, line = value, key.start_mark.line
                    break
    return line + 1


def lines_of_items(text: str, key: str) -> tuple[int, ...]:
    """Return the line, from 1, of each item of the list under a top-level key."""
    root = yaml.compose(text, Loader=NoAliasLoader)
    for name, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if name.value == key and isinstance(value, yaml.SequenceNode):
            return tuple(item.start_mark.line + 1 for item in value.value)
    return ()


class NoAliasLoader(yaml.SafeLoader):
    """A safe loader without aliases, so that no small file can expand into a huge one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, else compose as usual."""
        if self.check_event(yaml.events.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            why = "aliases (&, *) are not allowed"
            raise yaml.MarkedYAMLError(problem=why, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key given twice, of which the first would be lost without a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)
